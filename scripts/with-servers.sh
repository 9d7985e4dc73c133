#!/usr/bin/env bash
# Gets what the tests need, then runs the command given, if any.
#
#   scripts/with-servers.sh go test ./...
#
# Needed are a PostgreSQL and a MariaDB (or MySQL) server that the tests can start by themselves, and a C compiler for the race
# detector; nice to have are faketime, pgbouncer and procps. What is missing is installed from Debian's (or Ubuntu's) packages, as
# root or through sudo. Where that cannot be done but Docker works, containers stand in for the servers while the command runs; the
# tests that need a server of their own are then skipped. No server that is there already is touched.
set -euo pipefail

say() { echo "with-servers: $*" >&2; }
have() { command -v "$1" >/dev/null 2>&1 || [ -x "/usr/sbin/$1" ]; }
any() { for f in "$@"; do if [ -e "$f" ]; then return 0; fi; done; return 1; }

have_postgres() { [ -n "${LOCKER_TEST_POSTGRES:-}" ] || have initdb || any /usr/lib/postgresql/*/bin/initdb; }
have_mysql() {
	[ -n "${LOCKER_TEST_MYSQL:-}" ] || if have mariadbd; then have my_print_defaults; else have mysqld; fi
}
have_compiler() { # a working one: headers come in a package of their own
	local cc
	cc=$(go env CC)
	echo '#include <stdlib.h>' | ${cc:-cc} -E -o /dev/null - 2>/dev/null
}

have_galera() { # if it is asked for
	[[ ",${LOCKER_TEST_REQUIRE:-}," != *,galera,* ]] ||
		{ any /usr/lib*/galera*/libgalera_smm.so && have rsync && have wsrep_sst_rsync; }
}

must=() also=()
have_postgres || must+=(postgresql)
have_mysql || must+=(mariadb-server-core mariadb-client-core) # without -core it would come with a service
have_galera || must+=(mariadb-server) # galera-4 and rsync come with it
have_compiler || must+=(gcc libc6-dev)
if [ "$(uname)" = Linux ]; then
	any /usr/lib/*/faketime/libfaketime.so.1 || also+=(faketime)
	have pgbouncer || also+=(pgbouncer)
	have ps || also+=(procps)
fi

# as_root runs a command with root's rights, or fails.
as_root() {
	if [ "$(id -u)" = 0 ]; then
		"$@"
	elif [ -t 0 ]; then
		sudo "$@"
	else
		sudo -n "$@"
	fi
}

# may_install: apt-get is there, and root's rights.
may_install() {
	command -v apt-get >/dev/null 2>&1 && { [ "$(id -u)" = 0 ] || command -v sudo >/dev/null 2>&1; } && as_root true
}

# put writes standard input to a new file as root, with a mode. A file that is there stays, and that is no error.
put() {
	[ ! -e "$2" ] || return 0
	as_root mkdir -p "$(dirname "$2")"
	as_root tee "$2" >/dev/null
	as_root chmod "$1" "$2"
	made+=("$2")
}

made=()
unmake() {
	if [ ${#made[@]} -gt 0 ]; then as_root rm -f "${made[@]}"; fi
	made=()
}

# install gets packages. On the way no service starts, and PostgreSQL makes no cluster: only the programs are wanted.
install() {
	say "installing $* with apt-get"
	trap unmake EXIT
	put 755 /usr/sbin/policy-rc.d <<<$'#!/bin/sh\nexit 101'
	put 644 /etc/postgresql-common/createcluster.d/locker-tests.conf <<<'create_main_cluster = false'
	as_root apt-get update -q >&2 || say "apt-get update failed; trying with the lists that are there"
	local failed=0
	as_root env DEBIAN_FRONTEND=noninteractive apt-get install -yq --no-install-recommends "$@" >&2 || failed=1
	unmake
	trap - EXIT
	if [ -d /run/systemd/system ] && [[ " $* " == *" pgbouncer "* ]]; then
		as_root systemctl -q disable pgbouncer || true # nor at the next boot
	fi
	if [ -d /run/systemd/system ] && [[ " $* " == *" mariadb-server "* ]]; then
		as_root systemctl -q disable mariadb || true
	fi
	return "$failed"
}

# Nobody is asked for a password for what is only nice to have.
if [ ${#must[@]} -gt 0 ] || { [ ${#also[@]} -gt 0 ] && [ "$(id -u)" = 0 ]; }; then
	if may_install; then
		if ! install ${must[@]+"${must[@]}"} ${also[@]+"${also[@]}"}; then
			if [ ${#must[@]} -gt 0 ] && [ ${#also[@]} -gt 0 ]; then
				install "${must[@]}" || true # at least those
			fi
		fi
	fi
fi

have_compiler || { say "the race detector needs a C compiler. Install one (Debian: gcc libc6-dev)."; exit 1; }

containers=()
remove_containers() {
	if [ ${#containers[@]} -gt 0 ]; then docker rm -fv "${containers[@]}" >/dev/null; fi
}

# container starts one with its data in memory and its port, $1, on a free port of this machine, and prints its name.
container() {
	local port=$1
	shift
	docker run -d --rm -p "127.0.0.1::$port" "$@"
}

# await runs a command in a container until it succeeds, a minute at most.
await() {
	local name=$1
	shift
	for _ in $(seq 120); do
		if docker exec "$name" "$@" >/dev/null 2>&1; then return 0; fi
		sleep 0.5
	done
	docker logs --tail 20 "$name" >&2
	say "the container does not get ready"
	return 1
}

if ! have_postgres || ! have_mysql; then
	if ! docker info >/dev/null 2>&1; then
		have_postgres || say "no PostgreSQL server: install it (Debian: postgresql), or set LOCKER_TEST_POSTGRES to a postgres:// URL"
		have_mysql || say "no MariaDB or MySQL server: install one (Debian: mariadb-server-core mariadb-client-core), or set LOCKER_TEST_MYSQL to a go-sql-driver DSN"
		say "or let Docker run here"
		exit 1
	fi
	if [ $# -eq 0 ]; then
		say "Docker will run the servers while the tests do"
		exit 0
	fi
	trap remove_containers EXIT
	trap 'exit 130' INT TERM
	if ! have_postgres; then
		say "starting PostgreSQL in Docker"
		c=$(container 5432 --tmpfs /var/lib/postgresql/data -e POSTGRES_HOST_AUTH_METHOD=trust postgres:17 \
			-c fsync=off -c max_connections=400)
		containers+=("$c")
		await "$c" pg_isready -q -h 127.0.0.1 -U postgres
		export LOCKER_TEST_POSTGRES="postgres://postgres@$(docker port "$c" 5432/tcp | head -n 1)/postgres?sslmode=disable"
	fi
	if ! have_mysql; then
		say "starting MariaDB in Docker"
		c=$(container 3306 --tmpfs /var/lib/mysql -e MARIADB_ALLOW_EMPTY_ROOT_PASSWORD=1 mariadb:11.4 \
			--max-connections=400 --innodb-flush-log-at-trx-commit=0)
		containers+=("$c")
		await "$c" mariadb -h 127.0.0.1 -u root -e 'SELECT 1'
		export LOCKER_TEST_MYSQL="root@tcp($(docker port "$c" 3306/tcp | head -n 1))/"
	fi
	"$@" # not exec: the containers are removed afterwards
	exit
fi

if [ $# -gt 0 ]; then exec "$@"; fi
