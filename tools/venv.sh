# Makes or completes a virtual environment; sourced by the scripts that need one, from the checkout's root.
#
#   make_venv FOLDER REQUIREMENTS_FILE...
#
# Each file is installed once, and again when it changes. Without a GPU or NPU the CPU build of torch is
# taken where the package index has one, which saves gigabytes. The checkout becomes importable in the environment.

TORCH_CPU="torch==2.13.0+cpu"

has_accelerator() {
    command -v nvidia-smi >/dev/null || command -v npu-smi >/dev/null
}

make_venv() {
    local folder=$1; shift
    local python=${PYTHON:-python3}
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "Python 3.11 or newer is needed, but '$python' is $("$python" --version). Set PYTHON." >&2
        return 2
    }
    local pip=("$folder/bin/python" -m pip --disable-pip-version-check install --quiet)
    if [ ! -e "$folder/.ready" ]; then
        echo "Setting up $folder (once; a few minutes) ..."
        rm -rf "$folder"
        "$python" -m venv "$folder"
        if ! has_accelerator; then
            "${pip[@]}" "$TORCH_CPU" 2>/dev/null ||
                echo "No CPU build of torch in the package index: taking the default build."
        fi
        touch "$folder/.ready"
    fi
    pwd >"$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/megatron_omni.pth"
    local file stamp
    for file in "$@"; do
        stamp="$folder/.installed-$(sha256sum "$file" | cut -c1-16)"
        if [ ! -e "$stamp" ]; then
            "${pip[@]}" -r "$file"
            touch "$stamp"
        fi
    done
}
