"""Parts of platforms that the families of recurrences share: chunks of tokens, and the decays inside them."""
