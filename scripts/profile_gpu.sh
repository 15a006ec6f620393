#!/bin/sh
# Measures the operations of Llama-3.1-8B on the GPU of this machine, in less than 8 minutes, and writes a step-time
# profile: sh scripts/profile_gpu.sh [GPU name] [python with torch]
# Only torch is needed beside this package; no weights, no vLLM. Other shapes: change the scenario.
set -eu
gpu=${1:-H100}
python=${2:-python3}
cd "$(dirname "$0")/.."
"$python" -m real profile examples/chat-8b.yaml --device cuda --gpu "$gpu" --python "$python" --minutes 7 \
    --set engine.max_num_batched_tokens=8192 --out "Llama-3.1-8B_${gpu}_measured.json"
echo "simulate with it: twin run examples/chat-8b.yaml --set hardware.step_time=Llama-3.1-8B_${gpu}_measured.json"
