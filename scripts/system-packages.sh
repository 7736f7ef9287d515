#!/usr/bin/env bash
# Install what the project needs from Debian and does not find: Python's venv module,
# libnuma (vLLM's CPU kernels link to it), redis-server.
# Needs root for that. Without it, says what is missing and goes on: what needs Redis is then left out.
set -euo pipefail

python="${1:-python3}"
missing=()
"$python" -c "import ensurepip" 2>/dev/null || missing+=(python3-venv)
"$python" -c "import ctypes; ctypes.CDLL('libnuma.so.1')" 2>/dev/null || missing+=(libnuma1)
command -v redis-server >/dev/null || missing+=(redis-server)
((${#missing[@]})) || exit 0

if [[ "$(id -u)" != 0 ]] || ! command -v apt-get >/dev/null; then
    echo "warning: not installed and not installable from here (not root, or no apt-get): ${missing[*]}" >&2
    exit 0
fi
echo "Installing ${missing[*]} ..."
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >/dev/null; then
    echo "warning: apt-get could not install: ${missing[*]}" >&2
fi
