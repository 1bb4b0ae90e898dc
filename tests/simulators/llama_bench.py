"""A stand-in for ik_llama.cpp's llama-bench and llama-batched-bench: it prints what they print for the same options.

Run as `llama_bench.py PROGRAM OPTIONS...`; it writes its options to the file in LLAMA_BENCH_LOG. `--threads 9` makes it
fail as a program that cannot load a model, `--threads 8` print something else.
"""

import json
import os
import sys
from pathlib import Path

GENERATED_NANOSECONDS, PROMPT_NANOSECONDS = 80_000_000, 500_000_000
# What llama-bench printed on an AMD EPYC, but for what it was asked to do and the times.
RECORDED: dict[str, object] = json.loads("""{
    "build_commit": "ik-llama-cpp-python==0.1.5", "build_number": 0, "cuda": false, "vulkan": false, "kompute": false,
    "metal": false, "sycl": false, "rpc": "0", "gpu_blas": false, "blas": false, "cpu_info": "AMD EPYC", "gpu_info": "",
    "model_type": "llama ?B Q4_0", "model_size": 120022272, "model_n_params": 162826560, "n_batch": 2048,
    "n_ubatch": 512, "type_k": "f16", "type_v": "f16", "n_gpu_layers": 0, "split_mode": "layer", "main_gpu": 0,
    "no_kv_offload": false, "flash_attn": true, "mla_attn": 3, "attn_max_batch": 0, "ser": "-1,0", "reuse": true,
    "tensor_split": "0.00", "use_mmap": false, "embeddings": false, "repack": true, "mqkv": false, "muge": false,
    "fused_moe": true, "grouped_er": false, "no_fused_up_gate": false, "use_thp": false, "no_ooae": false,
    "rcache": false, "sas": false, "max_gpu": 0, "cuda_params": "", "override_tensor": "",
    "test_time": "2026-11-28T19:05:06Z", "stddev_ns": 0, "stddev_ts": 0.000000
}""")
ROW = "|{:6d} | {:6d} | {:4d} | {:6d} | {:8.3f} | {:8.2f} | {:8.3f} | {:8.2f} | {:8.3f} | {:8.2f} |"


def option(options: list[str], name: str) -> str:
    """The value after an option."""
    return options[options.index(name) + 1]


def bench(options: list[str]) -> str:
    """A list of one test, with the fields of the program that the adapter reads and some others."""
    prompt, generated = int(option(options, "-p")), 0
    if "-gp" in options:
        prompt, generated = (int(number) for number in option(options, "-gp").split(","))
    nanoseconds = GENERATED_NANOSECONDS * generated or PROMPT_NANOSECONDS
    speed = 1e9 * (generated or prompt) / nanoseconds
    test = RECORDED | {
        "model_filename": option(options, "-m"),
        "n_threads": int(option(options, "-t")),
        "n_prompt": prompt,
        "n_gen": generated,
        "avg_ns": nanoseconds,
        "avg_ts": speed,
        "test": f"tg{generated}@pp{prompt}" if generated else f"pp{prompt}",
        "samples_ns": [nanoseconds],
        "samples_ts": [speed],
    }
    return json.dumps([test], indent=2)


def batched_bench(options: list[str]) -> str:
    """The table of one batch: prompts at 100 tokens a second, decode at 40."""
    prompt, generated, batch = (int(option(options, name)) for name in ("-npp", "-ntg", "-npl"))
    tokens = batch * (prompt + generated)
    seconds = [batch * prompt / 100, batch * generated / 40]
    header = "|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |"
    row = ROW.format(
        prompt, generated, batch, tokens, seconds[0], 100, seconds[1], 40, sum(seconds), tokens / sum(seconds)
    )
    return f"main: n_kv_max = {tokens}\n\n{header}\n{row}\n"


def main() -> None:
    """Print to the stream that the program prints to."""
    program, options = sys.argv[1], sys.argv[2:]
    with Path(os.environ["LLAMA_BENCH_LOG"]).open("a") as log:
        print(program, *options, file=log)
    if option(options, "-t") == "9":
        print("main: error: unable to load model", file=sys.stderr)
        sys.exit(1)
    if option(options, "-t") == "8":
        print("no JSON")
    elif program == "llama-bench":
        print(bench(options))
    else:
        print(batched_bench(options), file=sys.stderr)


if __name__ == "__main__":
    main()
