"""The errors that the emulator raises."""


class EmulatorError(Exception):
    """Something is wrong with the kernel, or the emulator cannot run it."""


class UnsupportedError(EmulatorError):
    """The kernel uses something that the emulator does not have."""


class CompileError(EmulatorError):
    """Gluon's compiler would refuse this."""


class OutOfBoundsError(EmulatorError):
    """An address outside the array, or an index outside the shared memory."""


class UnfinishedError(EmulatorError):
    """A result is used, or the kernel ends, before the asynchronous operation was waited for."""


class RaceError(EmulatorError):
    """Two operations on the same shared memory, at least one a write, that nothing orders."""


class DeadlockError(EmulatorError):
    """Every partition waits for something that none will do."""
