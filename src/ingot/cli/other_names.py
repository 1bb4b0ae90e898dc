"""Commands and options of other programs, with what replaces them in the message that refuses them.

docs/coming-from.md has the options of servers in tables, next to what has no counterpart.
"""

_FIRST = "name the artifact, or a checkpoint, as the first argument"
_TOKENIZER = "an artifact has its tokenizer with it"
_DOWNLOADS = "Ingot downloads nothing: `hf download OWNER/MODEL --local-dir FOLDER`"
_TLS = "put a proxy with TLS in front of it"
_BY_TEMPLATE = "leave it out: calls and reasoning are read by what the chat template contains"
_ALWAYS = "leave it out: it is always so"
_BY_REQUEST = "it is a field of each request"
_TARGET = "the recipe decides where a model runs: `ingot recipes`"
_PLACE = "the recipe's `devices` and `place` divide a model among a GPU and the host"
_BITS = "the recipe decides bits: `ingot recipes`"
_KV_BITS = "the recipe decides it: `ingot build RECIPE --set passes.quantize-kv-cache.precision=int8`"
_CONTEXT = "use `ingot build RECIPE --set context_tokens=N`"
_THREADS = "use --set num_threads=N"

COMMANDS = {
    "bench": "`ingot build RECIPE --set latency={}` and `ingot validate` measure an artifact",
    "chat": "use `ingot run ARTIFACT`",
    "compile": "use `ingot build`",
    "complete": "use `ingot run ARTIFACT PROMPT`",
    "convert": "`ingot build` makes an artifact, `ingot transcode` another form of a checkpoint",
    "download": _DOWNLOADS,
    "eval": "use `ingot validate ARTIFACT --checkpoint FOLDER`",
    "evaluate": "use `ingot validate ARTIFACT --checkpoint FOLDER`",
    "generate": "use `ingot run ARTIFACT PROMPT`",
    "list": "`ingot recipes`, `ingot models` and `ingot passes` list what there is",
    "ls": "`ingot recipes`, `ingot models` and `ingot passes` list what there is",
    "pull": _DOWNLOADS,
    "quantize": "use `ingot build`, by a recipe such as int4-cpu",
    "show": "use `ingot inspect ARTIFACT`",
    "start": "use `ingot serve ARTIFACT`",
    "version": "use `ingot --version`",
}

_SERVE = {
    "--model": _FIRST,
    "-m": _FIRST,
    "--tokenizer": _TOKENIZER,
    "--hf-repo": _DOWNLOADS,
    "-hf": _DOWNLOADS,
    "--download-dir": _DOWNLOADS,
    "--trust-remote-code": "no code of a checkpoint is run; `ingot models` lists the model types",
    "--served-model-name": "use NAME=ARTIFACT, or --alias NAME=MODEL",
    "-a": "use --alias ALIAS=MODEL",
    "--dtype": _BITS,
    "--quantization": _BITS,
    "--kv-cache-dtype": _KV_BITS,
    "--cache-type-k": _KV_BITS,
    "-ctk": _KV_BITS,
    "--cache-type-v": _KV_BITS,
    "-ctv": _KV_BITS,
    "--block-size": "use `ingot build RECIPE --set engine.block_tokens=N`",
    "--max-model-len": _CONTEXT,
    "--ctx-size": _CONTEXT,
    "-c": _CONTEXT,
    "--gpu-memory-utilization": "use --set kv_bytes=SIZE, or a share of the free memory as kv_bytes=70%",
    "--kv-cache-memory-bytes": "use --set kv_bytes=SIZE",
    "--swap-space": "use --set kv_host_bytes=SIZE",
    "--slot-save-path": "use --set kv_disk_bytes=SIZE",
    "--cache-ram": "use --set kv_host_bytes=SIZE",
    "--enable-prefix-caching": _ALWAYS,
    "--no-enable-prefix-caching": "use --set prefix_cache=false",
    "--enable-chunked-prefill": _ALWAYS,
    "--cont-batching": _ALWAYS,
    "--metrics": _ALWAYS,
    "--jinja": _ALWAYS,
    "--max-num-seqs": "use --set max_sequences=N",
    "--parallel": "use --set max_sequences=N",
    "-np": "use --set max_sequences=N",
    "--max-num-batched-tokens": "use --set max_batch_tokens=N",
    "--batch-size": "use --set max_batch_tokens=N",
    "-b": "use --set max_batch_tokens=N",
    "--ubatch-size": "use --set max_batch_tokens=N",
    "--scheduling-policy": "leave it out: requests have `priority`",
    "--threads": _THREADS,
    "-t": _THREADS,
    "--no-mmap": "use --set weights=copied",
    **dict.fromkeys(("--n-gpu-layers", "-ngl", "--cpu-moe", "--n-cpu-moe", "--cpu-offload-gb"), _PLACE),
    "--device": _TARGET,
    "--tensor-parallel-size": "use --tensor-parallel N with an artifact of the native CPU engine",
    "-tp": "use --tensor-parallel N with an artifact of the native CPU engine",
    "--enable-expert-parallel": "use --expert-parallel with --tensor-parallel N",
    "--pipeline-parallel-size": "use --stages N with an artifact of the native CPU engine",
    "--cuda-graph-sizes": "use `ingot build RECIPE --set gpu.decode_rows=[1, 8, 64]`",
    "--speculative-config": "use --speculate DRAFTER",
    "--model-draft": "use --speculate ARTIFACT",
    "-md": "use --speculate ARTIFACT",
    "--draft-max": "use --set num_draft_tokens=N, with --speculate",
    "--enable-lora": "use --lora-modules NAME=FOLDER",
    "--lora": "use --lora-modules NAME=FOLDER",
    "--max-loras": "use --set max_adapters=N",
    "--max-lora-rank": "use --set max_adapter_rank=N",
    "--max-cpu-loras": "use --set max_host_adapters=N",
    "--chat-template-file": "use --chat-template FILE",
    "--enable-auto-tool-choice": _BY_TEMPLATE,
    "--tool-call-parser": _BY_TEMPLATE,
    "--reasoning-parser": _BY_TEMPLATE,
    "--reasoning-format": _BY_TEMPLATE,
    "--api-key": "use --api-keys FILE",
    "--api-key-file": "use --api-keys FILE",
    "--ssl-keyfile": _TLS,
    "--ssl-certfile": _TLS,
    "--ssl-key-file": _TLS,
    "--ssl-cert-file": _TLS,
    "--n-predict": "use --max-output-tokens N",
    "-n": "use --max-output-tokens N",
    "--timeout": "use --request-seconds N",
    "--enable-log-requests": "use --log-requests",
    "--otlp-traces-endpoint": "use --trace, and the variable OTEL_EXPORTER_OTLP_ENDPOINT",
    "--seed": _BY_REQUEST,
    "--temp": _BY_REQUEST,
    "--top-k": _BY_REQUEST,
    "--top-p": _BY_REQUEST,
    "--grammar": _BY_REQUEST,
}

_RUN = {
    "--model": "name the artifact as the first argument",
    "-m": "name the artifact as the first argument",
    "--prompt": "give the prompt after the artifact",
    "-p": "give the prompt after the artifact",
    "--file": "use `- < FILE` after the artifact",
    "-f": "use `- < FILE` after the artifact",
    "--n-predict": "use --max-tokens N",
    "-n": "use --max-tokens N",
    "--temp": "use --temperature",
    "--system-prompt": "use --system TEXT",
    "-sys": "use --system TEXT",
    "--interactive": "leave out the prompt at a terminal",
    "-i": "leave out the prompt at a terminal",
    "--stream": "leave it out: text is streamed unless there is --json",
    "--verbose": "use --stats",
    **{name: _SERVE[name] for name in ("--ctx-size", "-c", "--threads", "-t", "--n-gpu-layers", "-ngl", "--device")},
}

_BUILD = {
    "--model": "give the checkpoint after the recipe",
    "-m": "give the checkpoint after the recipe",
    "--checkpoint": "give the checkpoint after the recipe",
    "--recipe": "give the recipe first",
    "--bits": "use --set passes.quantize-weights.bits=N",
    "--gates": "use --set gates.METRIC=LIMIT",
    "--gate": "use --set gates.METRIC=LIMIT",
    "--target": "use --set target=NAME",
    "--device": "use --set target=NAME",
    "--text": "use --eval FILE",
    "--adapter": "use --set adapter=FOLDER",
    "--lora": "use --set adapter=FOLDER",
}

_ADDRESS = dict.fromkeys(("--url", "--host", "--port", "--base-url"), "give the server's address as the argument")

OPTIONS = {"serve": _SERVE, "run": _RUN, "build": _BUILD, "doctor": _ADDRESS, "top": _ADDRESS}
