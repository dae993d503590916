"""The layers as their papers and published code describe them: token by token, in NumPy, with no framework.

``stored`` is what becomes of the result of a step: in layers of bfloat16 it is rounded.
"""

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + x.dtype.type(eps)) * weight


def convolution(x, weight, bias, stored):
    """Each channel of ``[T, D]`` with its ``[D, 1, taps]``, the last tap at the token itself; then silu."""
    taps = weight.shape[2]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1]), x.dtype), x])
    rows = [(padded[t : t + taps].T * weight[:, 0]).sum(1) for t in range(len(x))]
    return silu(stored(np.stack(rows) + (0 if bias is None else bias)))


def recurrence(q, k, v, decays, scale):
    """Outputs ``[T, H, V]`` and the state ``[H, K, V]``; decays ``[T, H, K]``, factors of the state."""
    T, H, K = q.shape
    state, outputs = np.zeros((H, K, v.shape[2]), q.dtype), []
    for t in range(T):
        state = decays[t][..., None] * state + k[t][..., None] * v[t][:, None]
        outputs.append(q.dtype.type(scale) * np.einsum("hkv,hk->hv", state, q[t]))
    return np.stack(outputs), state


def shared(x, heads):
    """Heads that groups of heads have in common, once for each."""
    return np.repeat(x, heads // x.shape[1], axis=1)


def gated(w, x, *, heads, kv_heads, normalizer=16, feature_map=None, clamp=None, gated_output=True, gate=silu,
          stored=lambda x: x):
    """flash-linear-attention's GLA layer, and its simple one, from weights ``w``; ``[T, hidden]``."""
    q, k, v = (stored(x @ w[f"{name}_proj.weight"].T) for name in "qkv")
    if "q_conv1d.weight" in w:
        q, k, v = (
            stored(convolution(part, w[f"{name}_conv1d.weight"], w.get(f"{name}_conv1d.bias"), stored))
            for name, part in zip("qkv", (q, k, v), strict=True)
        )
    T = len(x)
    q, k, v = q.reshape(T, heads, -1), k.reshape(T, kv_heads, -1), v.reshape(T, kv_heads, -1)
    if feature_map is not None:
        q, k = feature_map(q), feature_map(k)
    if "gk_proj.weight" in w:
        logits = stored(x @ w["gk_proj.weight"].T + w["gk_proj.bias"]).reshape(T, heads, 1)
    else:
        logits = stored(x @ w["gk_proj.0.weight"].T) @ w["gk_proj.1.weight"].T + w["gk_proj.1.bias"]
        logits = stored(logits).reshape(T, kv_heads, -1)
    gates = stored(np.log(sigmoid(logits))) / x.dtype.type(normalizer)
    gates = gates if clamp is None else np.maximum(gates, x.dtype.type(clamp))
    decays = np.broadcast_to(shared(np.exp(gates), heads), q.shape)
    o, state = recurrence(q, shared(k, heads), shared(v, heads), decays, q.shape[2] ** -0.5)
    norm = w["g_norm_swish_gate.weight" if "g_norm_swish_gate.weight" in w else "g_norm.weight"]
    o = stored(rms_norm(stored(o), norm, 1e-5))
    if gated_output:
        o = stored(o * stored(gate(stored(x @ w["g_proj.weight"].T).reshape(o.shape))))
    return stored(o.reshape(T, -1) @ w["o_proj.weight"].T), state


def rotary(x, places, dim, theta):
    """The first ``dim`` of ``[T, H, D]``, as pairs of one from each half, turned by their place; angles in float32."""
    n = dim // 2
    speeds = (theta ** (-np.arange(n) / n)).astype(np.float32)
    angles = (places.astype(np.float32)[:, None] * speeds)[:, None]
    cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    a, b = x[..., :n], x[..., n:dim]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., dim:]], -1)


def lightning(w, x, *, heads, decay, model, rotary_dim=0, theta=1e4, groups=1,
              stored=lambda x: x):
    """The lightning layer of a model, from its weights."""
    T, constant = len(x), np.exp(np.asarray(decay, x.dtype))
    if model == "minimax":
        qkv = stored(silu(stored(x @ w["qkv_proj.weight"].T))).reshape(T, heads, -1)
        q, k, v = np.split(qkv, 3, axis=2)
        norm, gate, out, scale = "norm", "output_gate", "out_proj", 1.0
    elif model == "bailing":
        qkv = stored(x @ w["query_key_value.weight"].T).reshape(T, 3 * heads, -1)
        q, k, v = np.split(qkv, 3, axis=1)
        q = stored(rms_norm(q, w["query_layernorm.weight"], 1e-6))
        k = stored(rms_norm(k, w["key_layernorm.weight"], 1e-6))
        norm, gate, out, scale = "g_norm", "g_proj", "dense", q.shape[2] ** -0.5
    else:
        q, k, v = (stored(x @ w[f"{name}_proj.weight"].T).reshape(T, heads, -1) for name in "qkv")
        q, k = (stored(rms_norm(part, w[f"{name}_norm.weight"], 1e-6)) for name, part in zip("qk", (q, k), strict=True))
        norm, gate, out, scale = "o_norm", "z_proj", "o_proj", q.shape[2] ** -0.5
    if rotary_dim:
        q, k = (stored(rotary(part, np.arange(T), rotary_dim, theta)) for part in (q, k))
    o, state = recurrence(q, k, v, np.broadcast_to(constant[:, None], q.shape), scale)
    o = rms_norm(stored(o).reshape(T, groups, -1), w[f"{norm}.weight"].reshape(groups, -1), 1e-6).reshape(T, -1)
    o = stored(stored(o) * stored(sigmoid(stored(x @ w[f"{gate}.weight"].T))))
    return stored(o @ w[f"{out}.weight"].T), state


def delta_parts(w, x, heads, value_heads, stored):
    """q, k, v, z, b and a of ``[T, hidden]``, of flash-linear-attention's layers and of Qwen3-Next's."""
    def product(*names):
        y = x
        for name in names:
            y = stored(y @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0))
        return y

    if "in_proj_qkvz.weight" not in w:
        z, a = (product(*[key[:-7] for key in sorted(w) if key.startswith(name) and key.endswith("weight")])
                for name in ("g_proj", "f_proj" if "f_proj.0.weight" in w else "a_proj"))
        return [*(product(f"{name}_proj") for name in "qkv"), z, product("b_proj"), a]
    # For each key head: q, k, and v and z of the value heads that read it; then b and a of these.
    qkvz, ba = (product(f"in_proj_{name}").reshape(len(x), heads, -1) for name in ("qkvz", "ba"))
    width = w["out_proj.weight"].shape[1] // heads
    K = qkvz.shape[2] // 2 - width
    parts = *np.split(qkvz, [K, 2 * K, 2 * K + width], axis=2), *np.split(ba, 2, axis=2)
    return [part.reshape(len(x), -1) for part in parts]


def delta(w, x, *, heads, value_heads, eps, gate=silu, most=1, lower_bound=None, stored=lambda x: x):
    """Gated DeltaNet and Kimi Delta Attention, from the layer's weights; beta is up to ``most``."""
    q, k, v, z, b, a = delta_parts(w, x, heads, value_heads, stored)
    if "conv1d.weight" in w:
        qkv = stored(convolution(np.concatenate([q, k, v], 1), w["conv1d.weight"], None, stored))
        q, k, v = np.split(qkv, [q.shape[1], 2 * q.shape[1]], axis=1)
    else:
        q, k, v = (stored(convolution(part, w[f"{name}_conv1d.weight"], w.get(f"{name}_conv1d.bias"), stored))
                   for name, part in zip("qkv", (q, k, v), strict=True))
    T = len(x)
    v, z, a = (part.reshape(T, value_heads, -1) for part in (v, z, a))
    q, k = (shared(part.reshape(T, heads, -1), value_heads) for part in (q, k))
    q, k = (part / np.sqrt((part * part).sum(-1, keepdims=True) + x.dtype.type(1e-6)) for part in (q, k))
    rate, a = np.exp(w["A_log"][:, None]), a + w["dt_bias"].reshape(value_heads, -1)
    g = -rate * np.logaddexp(0, a) if lower_bound is None else lower_bound * sigmoid(rate * a)
    beta, K, V = most * sigmoid(b)[..., None], q.shape[2], v.shape[2]
    state, outputs = np.zeros((value_heads, K, V), x.dtype), []
    for t in range(T):
        state = np.exp(g[t])[..., None] * state
        error = v[t] - np.einsum("hkv,hk->hv", state, k[t])
        state = state + k[t][..., None] * (beta[t] * error)[:, None]
        outputs.append(x.dtype.type(K ** -0.5) * np.einsum("hkv,hk->hv", state, q[t]))
    norm, out = ("norm", "out_proj") if "norm.weight" in w else ("o_norm", "o_proj")
    o = stored(rms_norm(stored(np.stack(outputs)), w[f"{norm}.weight"], eps))
    o = stored(o * stored(gate(z)))
    return stored(o.reshape(T, -1) @ w[f"{out}.weight"].T), state
