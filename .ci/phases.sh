# To be sourced in the repository's root: times phases. The pytest that comes last prints a table of them (tests/conftest.py).

if [[ -z ${BACKHAUL_PHASES:-} ]]; then
    export BACKHAUL_PHASES=$PWD/build/phases.txt
    mkdir -p build
    : >"$BACKHAUL_PHASES"
fi

# phase NAME COMMAND...: returns the command's status.
phase() {
    local name=$1 began=$SECONDS status=0
    shift
    echo "== $name"
    "$@" || status=$?
    printf '%5d s  %s\n' $((SECONDS - began)) "$name" | tee -a "$BACKHAUL_PHASES"
    return $status
}
