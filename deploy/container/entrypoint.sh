#!/bin/sh
# Gives a container its identity on its first start, then becomes the agent (so signals reach it).
#
#   STAGEMESH_INVITE_FOR="beta gamma"  this container founds the mesh and writes one join token per name
#   STAGEMESH_JOIN_AS="beta"           this container waits for the token of that name and joins with it
#   STAGEMESH_INVITATIONS=/invitations where tokens are handed over: a volume that only these containers see
#
# Without these variables nothing is prepared: run `init` or `join` yourself.
set -eu

invitations=${STAGEMESH_INVITATIONS:-/invitations}
state=${STAGEMESH_NODE__STATE_DIR:-${STATE_DIRECTORY:-/var/lib/stagemesh}}
umask 077

found_mesh() {
    [ -e "$state/mesh.json" ] || stagemesh init
    for name in $STAGEMESH_INVITE_FOR; do
        [ -e "$invitations/$name.joined" ] && continue
        stagemesh invite --ttl 1d >"$invitations/.$name.new"
        head -n 1 "$invitations/.$name.new" >"$invitations/.$name.token"
        mv "$invitations/.$name.token" "$invitations/$name.token"
        rm -f "$invitations/.$name.new"
    done
}

join_mesh() {
    token="$invitations/$STAGEMESH_JOIN_AS.token"
    tries=0
    while [ ! -e "$state/mesh.json" ]; do
        if [ -s "$token" ] && stagemesh join - <"$token"; then
            break
        fi
        tries=$((tries + 1))
        if [ "$tries" -ge 60 ]; then
            echo "stagemesh: could not join after $tries tries; is the founder up, and is $token fresh?" >&2
            exit 1
        fi
        sleep 2
    done
    : >"$invitations/$STAGEMESH_JOIN_AS.joined"
    rm -f "$token"
}

if [ "${1:-run}" = run ]; then
    if [ -n "${STAGEMESH_INVITE_FOR:-}" ]; then found_mesh; fi
    if [ -n "${STAGEMESH_JOIN_AS:-}" ]; then join_mesh; fi
fi
exec stagemesh "$@"
