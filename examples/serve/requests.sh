#!/bin/sh
# Ask a running `ingot serve` with curl: sh examples/serve/requests.sh [URL]
set -e
url=${1:-http://127.0.0.1:8000}

curl -sf "$url/ready" && echo
curl -sf "$url/v1/models" && echo
curl -sf "$url/v1/completions" -d '{"prompt": "def read_file(path):", "max_tokens": 24, "temperature": 0}' && echo
curl -sfN "$url/v1/completions" \
  -d '{"prompt": "import os", "max_tokens": 24, "seed": 1, "stream": true, "stream_options": {"include_usage": true}}'
curl -sf "$url/tokenize" -d '{"prompt": "def read_file(path):", "return_token_strs": true}' && echo
curl -sf "$url/metrics" | grep '^vllm:generation_tokens_total'
