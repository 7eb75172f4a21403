#!/usr/bin/env bash
# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
#
# Formatting, lint, import order and SPDX headers of every Python and shell file.
#   ./format.sh           mends what it can, then reports the rest
#   ./format.sh --check   changes nothing and fails if anything is left to mend: what CI runs
set -euo pipefail
cd "$(dirname "$0")"

case "${1-}" in
  "") check=false ;;
  --check) check=true ;;
  *) echo "usage: ./format.sh [--check]" >&2; exit 2 ;;
esac

ruff() { "${PYTHON:-python3}" -m ruff "$@"; }
if ! ruff --version >/dev/null 2>&1; then
  . scripts/environment.sh
  ensure_environment dev -- ruff
fi

header='# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT'

source_files() {
  git ls-files --cached --others --exclude-standard -- '*.py' '*.sh' .ci/run 2>/dev/null ||
    find . -name '.?*' ! -name .ci -prune -o -type f \( -name '*.py' -o -name '*.sh' -o -path ./.ci/run \) -print
}

has_header() { [ "$(head -n 3 "$1" | grep -cFx "$header")" = 2 ]; }

add_header() {
  local text
  text=$(cat "$1"; echo .)  # the dot keeps the file's last newline
  text=${text%.}
  if [[ $text == '#!'* ]]; then
    printf '%s\n%s\n%s' "${text%%$'\n'*}" "$header" "${text#*$'\n'}" >"$1"
  else
    printf '%s\n%s%s' "$header" "${text:+$'\n'}" "$text" >"$1"
  fi
}

status=0
while IFS= read -r file; do
  if [ ! -f "$file" ] || has_header "$file"; then
    continue
  elif $check; then
    echo "$file: no SPDX header in its first lines"
    status=1
  else
    add_header "$file"
    echo "$file: SPDX header added"
  fi
done < <(source_files)

if $check; then
  ruff format --check . || status=1
  ruff check . || status=1
else
  ruff format .
  ruff check --fix . || status=1
fi
exit "$status"
