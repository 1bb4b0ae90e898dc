"""The structures of the C sources, as ctypes: field for field what paged_attention.h and launch.h declare."""

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p


class Layer(Structure):
    """paged_attention.h's struct layer."""

    _fields_ = (
        ("pool", c_void_p),
        ("block_bytes", c_int64),
        ("keys", c_int64),
        ("values", c_int64),
        ("key_scales", c_int64),
        ("value_scales", c_int64),
        ("query", c_void_p),
        ("key", c_void_p),
        ("value", c_void_p),
        ("output", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("query_stride", c_int64),
        ("key_stride", c_int64),
        ("value_stride", c_int64),
        ("output_stride", c_int64),
        ("rotary_dim", c_int32),
        ("key_kind", c_int32),
        ("value_kind", c_int32),
        ("group", c_int32),
        ("writes", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("dim", c_int32),
        ("block_tokens", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
    )


class Step(Structure):
    """paged_attention.h's struct step."""

    _fields_ = (
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("num_sequences", c_int32),
        ("max_blocks", c_int32),
        ("threads", c_int32),
    )
