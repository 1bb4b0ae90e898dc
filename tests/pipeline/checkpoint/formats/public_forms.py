"""The forms in which quantized checkpoints are published: which are read, and what proves it; docs/formats.md has them.

A form that is read names its proofs: fixtures that the owning package wrote (shared data), checkpoints that
tests/oracle/make_public_forms.py writes with the package, or the tests of its documented layout. A form that is refused
has its settings, as the package writes them into config.json, and the start of the message.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ingot.pipeline.checkpoint.gguf_file import OTHER_TYPES

HEADER = "| form | | proof or message |\n|---|---|---|\n"
NOT_READ = "which Ingot does not read"


@dataclass(frozen=True)
class Form:
    """A form by its name.

    fixtures    folders of golden/quantized
    kinds       checkpoints of make_public_forms.py, with the version of the package that wrote them
    layout      the module in tests/ that makes it by its documented layout, without the suffix
    settings    quantization_config of a form that is refused
    message     how its refusal begins, after the name of the file
    """

    name: str
    fixtures: Sequence[str] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)
    layout: str = ""
    settings: Mapping[str, Any] | None = None
    message: str = ""

    @property
    def row(self) -> str:
        """The form's row of the table."""
        if self.message:
            return f"| {self.name} | refused | {self.message} |\n"
        proofs = [f"file of {tool}" for tool in dict.fromkeys(name.partition("-")[0] for name in self.fixtures)]
        proofs += [f"file of {version}" for version in dict.fromkeys(self.kinds.values())]
        return f"| {self.name} | read | {', '.join(proofs) or 'documented layout'} |\n"


def _other(method: str, title: str, **settings: Any) -> Form:
    given = {"quant_method": method, **settings}
    return Form(title, settings=given, message=f"quant_method is '{method}', {NOT_READ}")


_GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
_AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
_ROUND: dict[str, Any] = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}
_AUTO_ROUND, _MODEL_OPT = "auto-round 0.16.1", "nvidia-modelopt 0.47.0"
_BITS_AND_BYTES = "bitsandbytes 0.50.2"

FORMS = (
    Form("GPTQ version 1, symmetric", ["autogptq-w4-sym", "gptqmodel-gptq_v1-w4-sym"],
         {"auto-round-auto_gptq": _AUTO_ROUND}),
    Form("GPTQ version 1, asymmetric", ["autogptq-w4-asym", "autogptq-w3-asym"]),
    Form("GPTQ version 2 (`gptq_v2`)", ["gptqmodel-gptq_v2-w3-asym"]),
    Form("GPTQ with activation order", ["autogptq-w4-sym-descact"]),
    Form("GPTQ, Marlin's layout", settings={**_GPTQ, "is_marlin_format": True},
         message="is_marlin_format is True; Marlin's layout is not read"),
    Form("GPTQ, `checkpoint_format: marlin`", settings={**_GPTQ, "checkpoint_format": "marlin"},
         message="checkpoint_format is 'marlin'; Ingot reads gptq, gptq_v2"),
    Form("GPTQ with settings per layer", settings={**_GPTQ, "dynamic": {"-:.*mlp.*": {}}},
         message="dynamic is {'-:.*mlp.*': {}}; settings per layer are not read"),
    Form("GPTQ of 5 bits", settings={**_GPTQ, "bits": 5}, message="bits is 5; it must be 2, 3, 4 or 8"),
    Form("AWQ, gemm", ["autoawq-gemm-w4-asym", "gptqmodel-awq_gemm-w4-asym"]),
    *(Form(f"AWQ, {version}", settings={**_AWQ, "version": version},
           message=f"version is '{version}'; Ingot reads 'gemm' and no other layout of AWQ")
      for version in ("gemv", "gemv_fast", "marlin", "ipex", "llm-awq")),
    Form("AWQ without zero points", settings={**_AWQ, "zero_point": False},
         message="zero_point is False; it must be True"),
    Form("compressed-tensors W4A16", ["llmcompressor-gptq-w4-sym"]),
    Form("compressed-tensors W4A16, asymmetric", ["llmcompressor-gptq-w4-asym"],
         {"compressed-tensors-W4A16_ASYM": "compressed-tensors 0.19.0"}),
    Form("compressed-tensors W8A16", ["llmcompressor-w8a16"]),
    Form("compressed-tensors W8A8, integers", ["llmcompressor-w8a8-int8"]),
    Form("compressed-tensors W8A8, fp8, static and dynamic", ["llmcompressor-fp8", "llmcompressor-fp8-dynamic"]),
    Form("compressed-tensors with scales of the KV cache", ["llmcompressor-fp8-kv"]),
    Form("compressed-tensors NVFP4A16", ["llmcompressor-nvfp4a16"]),
    Form("compressed-tensors MXFP4A16", ["llmcompressor-mxfp4a16"]),
    Form("compressed-tensors with activation order", layout="pipeline/interchange/test_transcode"),
    Form("compressed-tensors with mixed groups", layout="pipeline/interchange/test_export"),
    Form("ModelOpt `FP8`", kinds={"modelopt-FP8": _MODEL_OPT}),
    Form("ModelOpt `NVFP4`", kinds={"modelopt-NVFP4": _MODEL_OPT}),
    Form("ModelOpt `W4A16_AWQ`", kinds={"modelopt-W4A16_AWQ": _MODEL_OPT}),
    Form("ModelOpt `W4A8_AWQ`", kinds={"modelopt-W4A8_AWQ": _MODEL_OPT}),
    Form("ModelOpt `W4A16_NVFP4`, `NVFP4_AWQ`, `FP8_PER_CHANNEL_PER_TOKEN`, `FP8_PB_WO`, `MIXED_PRECISION`",
         layout="pipeline/checkpoint/formats/test_modelopt"),
    *(Form(f"ModelOpt `{algorithm}`", settings={"quant_method": "modelopt", "quant_algo": algorithm},
           message=f"quant_algo is '{algorithm}'; Ingot reads")
      for algorithm in ("INT8_SQ", "MXFP8", "NVFP4_SVDQUANT", "W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8")),
    Form("fp8 in blocks (`weight_scale_inv`) and with one scale a layer",
         layout="pipeline/checkpoint/formats/test_fp8"),
    Form("fp8 with fp4 experts", settings={"quant_method": "fp8", "expert_dtype": "fp4"},
         message="expert_dtype is 'fp4'; Ingot reads fp8"),
    Form("fbgemm_fp8", layout="pipeline/checkpoint/formats/test_fp8"),
    Form("mxfp4 of gpt_oss", layout="pipeline/checkpoint/formats/test_mxfp4"),
    Form("AutoRound, `auto_round:auto_gptq`", kinds={"auto-round-gptq-sym": _AUTO_ROUND,
         "auto-round-gptq-asym": _AUTO_ROUND, "auto-round-default": _AUTO_ROUND}),
    Form("AutoRound, `auto_round:auto_awq`", kinds={"auto-round-awq": _AUTO_ROUND}),
    Form("AutoRound, other packings", settings={**_ROUND, "packing_format": "auto_round:fp8"},
         message="packing_format is 'auto_round:fp8'; of auto-round Ingot reads auto_round:auto_awq,"),
    Form("AutoRound with settings per layer",
         settings={**_ROUND, "packing_format": "auto_round:auto_gptq", "extra_config": {"a": {"bits": 8}}},
         message="extra_config gives 'a' 8 bits in groups of 32"),
    Form("bitsandbytes, nf4 and fp4", kinds={"bitsandbytes-nf4": _BITS_AND_BYTES, "bitsandbytes-fp4": _BITS_AND_BYTES}),
    Form("bitsandbytes, nf4 with double quantization", kinds={"bitsandbytes-nf4-double": _BITS_AND_BYTES}),
    Form("bitsandbytes, 8 bits", kinds={"bitsandbytes-int8": _BITS_AND_BYTES}),
    Form("bitsandbytes, stored as other types", settings={"quant_method": "bitsandbytes", "load_in_4bit": True,
         "bnb_4bit_quant_storage": "bfloat16"}, message="bnb_4bit_quant_storage is 'bfloat16'; Ingot reads uint8 of"),
    Form("BitNet, packed", layout="pipeline/checkpoint/formats/test_bitnet"),
    Form("BitNet, `quantization_mode: online`", settings={"quant_method": "bitnet", "quantization_mode": "online"},
         message="quantization_mode is 'online'; Ingot reads offline of bitnet"),
    _other("torchao", "torchao", quant_type={"default": {"_type": "Int8WeightOnlyConfig"}}),
    _other("hqq", "HQQ", quant_config={"weight_quant_params": {"nbits": 4, "group_size": 64}}),
    _other("eetq", "EETQ", weights="int8"),
    _other("quanto", "quanto", weights="int8"),
    _other("aqlm", "AQLM", in_group_size=8, nbits_per_codebook=16),
    _other("vptq", "VPTQ", config_for_layers={}),
    _other("spqr", "SpQR", bits=3, beta1=16),
    _other("higgs", "HIGGS", bits=4, p=2),
    _other("quark", "Quark", weight_format="real_quantized"),
    _other("exl2", "EXL2", bits=4.0),
    _other("exl3", "EXL3", bits=4.0),
    _other("mxfp8", "mxfp8", weight_block_size=[1, 32]),
    Form("GGUF Q4_0, Q4_1, Q8_0", ["gguf-Q4_0", "gguf-Q4_1", "gguf-Q8_0"]),
    Form("GGUF Q3_K, Q4_K, Q6_K", ["gguf-llamacpp-Q3_K_M", "gguf-llamacpp-Q4_K_M", "gguf-llamacpp-Q6_K"]),
    Form("GGUF Q5_0, Q5_1, Q5_K", kinds={"gguf-types": "gguf 0.19.0"}),
    Form("GGUF F32, F16, BF16", layout="pipeline/checkpoint/formats/test_gguf_blocks"),
    Form(f"GGUF {', '.join(OTHER_TYPES.values())}", message=f"'...' is of Q2_K, {NOT_READ}"),
)  # fmt: skip


def table() -> str:
    """The table of docs/formats.md."""
    return HEADER + "".join(form.row for form in FORMS)
