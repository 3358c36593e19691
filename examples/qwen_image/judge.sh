# A judge beside a run; sourced by the scripts that want one, from the checkout's root.
#
#   start_judge MODEL NAME [flags of vllm serve]
#       Serves MODEL with vLLM from $ROLLOUT_VENV under NAME, with its log in the file $judge_log. Returns when it
#       is ready, with its address in $judge_url.
#   run COMMAND...
#       Runs it to its end.
#
# Whatever ends the script ends both.

started=()
judge_is_ready='import sys
from urllib.request import ProxyHandler, build_opener
build_opener(ProxyHandler({})).open(sys.argv[1], timeout=10)'

finish() {
    kill "${started[@]}" 2>/dev/null || true
    wait
}
trap finish EXIT
trap 'exit 1' INT TERM HUP

start_judge() {
    local model=$1 name=$2; shift 2
    local python="$ROLLOUT_VENV/bin/python" port
    port=$("$python" -c 'from megatron_omni.ports import free_port; print(free_port())')
    echo "Starting the judge (log: $judge_log) ..."
    "$ROLLOUT_VENV/bin/vllm" serve "$model" --served-model-name "$name" --host 127.0.0.1 --port "$port" \
        --limit-mm-per-prompt.image 1 --limit-mm-per-prompt.video 0 --max-model-len 4096 \
        --structured-outputs-config.backend xgrammar --structured-outputs-config.disable_any_whitespace true \
        "$@" >"$judge_log" 2>&1 &
    started+=($!)
    until "$python" -c "$judge_is_ready" "http://127.0.0.1:$port/health" 2>/dev/null; do
        if ! kill -0 "${started[-1]}" 2>/dev/null; then
            echo "The judge has ended:" >&2
            tail -n 20 "$judge_log" >&2
            return 1
        fi
        sleep 1
    done
    judge_url=http://127.0.0.1:$port/v1
}

run() {
    "$@" & # not in the foreground: there the shell would heed signals only after it
    started+=($!)
    wait $!
}
