#!/usr/bin/env bash
# Every test, in two processes at a time: worlds of ranks wait much, and so do recipes, which leaves a core idle.
#
#     scripts/run_tests.sh                    # what `make test` runs
#     scripts/run_tests.sh -k scheduler       # with arguments for pytest: in one process
set -uo pipefail

cd "$(dirname "$0")/.."
python=${PYTHON:-python}
if [ $# -gt 0 ]; then exec "$python" -m pytest "$@"; fi

log=$(mktemp "${TMPDIR:-/tmp}/worlds.XXXXXX")
"$python" -m pytest tests/distributed tests/gpu >"$log" 2>&1 &
worlds=$!
trap 'kill "$worlds" 2>/dev/null; rm -f "$log"' EXIT

echo "==> tests/unit, tests/recipes and the README; beside them tests/distributed and tests/gpu, shown at their end"
status=0
"$python" -m pytest tests/unit tests/recipes tests/test_readme.py || status=$?
wait "$worlds" || status=$?
echo "==> tests/distributed and tests/gpu"
cat "$log"
exit "$status"
