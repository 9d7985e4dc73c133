package testdb

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
)

// A kind is all that differs between the servers that testdb can start.
type kind struct {
	name, driver string
	env          string         // names the server to use instead of starting one
	account      string         // whom it runs as when the test is root; "" is root
	stop         syscall.Signal // asks it to end in good order
	crash        string         // the signal that ends it and its children at once, as kill -s names it
	identity     string         // a query that answers with its data folder
	init         string         // a statement for a new server; "" is none
	find         func() (*program, error)
	dsn          func(port int) string

	once   sync.Once
	server *Server // kept reachable: were it collected, the pipe that keeps it alive would be closed
	err    error
}

// A program is a server that is installed here. Both commands are run in dir, the first once, to fill dir/data.
type program struct {
	init  func(dir string, o Options) []string
	serve func(dir string, port int, o Options) []string
}

var postgres = &kind{
	name: "postgres", driver: "pgx", env: "LOCKER_TEST_POSTGRES",
	account: "postgres", // it refuses root
	stop:    syscall.SIGINT, crash: "QUIT",
	identity: "SHOW data_directory",
	find:     sync.OnceValues(findPostgres),
	dsn: func(port int) string {
		return fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres?sslmode=disable", port)
	},
}

var maria = &kind{
	name: "mysql", driver: "mysql", env: "LOCKER_TEST_MYSQL",
	stop: syscall.SIGTERM, crash: "KILL",
	identity: "SELECT @@datadir",
	init:     "CREATE DATABASE IF NOT EXISTS locker",
	find:     sync.OnceValues(findMySQL),
	dsn:      func(port int) string { return fmt.Sprintf("root@tcp(127.0.0.1:%d)/", port) },
}

// shared returns the process's own server.
func (k *kind) shared() (*Server, error) {
	k.once.Do(func() { k.server, k.err = start(k, Options{}) })
	return k.server, k.err
}

func findPostgres() (*program, error) {
	if !canStart {
		return nil, errors.New("testdb starts no servers on this system")
	}
	var bin string
	if p, err := exec.LookPath("initdb"); err == nil {
		if p, err = filepath.EvalSymlinks(p); err != nil {
			return nil, err
		}
		bin = filepath.Dir(p)
	} else { // Debian keeps them out of PATH, one folder for each major version
		all, _ := filepath.Glob("/usr/lib/postgresql/*/bin/initdb")
		if len(all) == 0 {
			return nil, errors.New("no PostgreSQL server (initdb) in PATH or /usr/lib/postgresql")
		}
		major := func(p string) int { n, _ := strconv.Atoi(strings.Split(p, "/")[4]); return n }
		bin = filepath.Dir(slices.MaxFunc(all, func(a, b string) int { return major(a) - major(b) }))
	}
	return &program{
		init: func(dir string, o Options) []string {
			return append([]string{
				filepath.Join(bin, "initdb"), "-D", dir + "/data", "-N", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C",
			}, o.Init...)
		},
		serve: func(dir string, port int, o Options) []string {
			args := []string{
				filepath.Join(bin, "postgres"), "-D", dir + "/data", "-p", strconv.Itoa(port),
				"-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=",
				"-c", "max_connections=400", "-c", "shared_buffers=64MB",
				"-c", "dynamic_shared_memory_type=mmap", // in the folder: a killed server leaves nothing elsewhere
			}
			if !o.Durable {
				args = append(args, "-c", "fsync=off", "-c", "synchronous_commit=off", "-c", "full_page_writes=off")
			}
			return append(args, o.Args...)
		},
	}, nil
}

func findMySQL() (*program, error) {
	if !canStart {
		return nil, errors.New("testdb starts no servers on this system")
	}
	server := look("mariadbd", "mysqld")
	if server == "" {
		return nil, errors.New("no MariaDB or MySQL server (mariadbd, mysqld) in PATH or /usr/sbin")
	}
	version, err := exec.Command(server, "--version").CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("%s --version: %w: %s", server, err, version)
	}
	var p program
	var flavour []string
	if strings.Contains(string(version), "MariaDB") {
		install := look("mariadb-install-db", "mysql_install_db")
		if install == "" {
			return nil, errors.New("no mariadb-install-db in PATH")
		}
		p.init = func(dir string, o Options) []string {
			return slices.Concat([]string{install, "--no-defaults"}, asRoot(), []string{
				"--datadir=" + dir + "/data", "--auth-root-authentication-method=normal", "--skip-test-db",
			}, o.Init)
		}
		// MySQL makes no root@127.0.0.1, and needs the name of the address to find root@localhost.
		flavour = []string{"--skip-name-resolve"}
	} else {
		p.init = func(dir string, o Options) []string {
			return slices.Concat([]string{server, "--no-defaults", "--initialize-insecure"}, asRoot(),
				[]string{"--datadir=" + dir + "/data"}, o.Init)
		}
		flavour = []string{"--mysqlx=OFF", "--skip-log-bin"}
	}
	p.serve = func(dir string, port int, o Options) []string {
		args := slices.Concat([]string{server, "--no-defaults"}, asRoot(), flavour, []string{
			"--datadir=" + dir + "/data", "--tmpdir=" + dir, "--socket=" + dir + "/s.sock", "--pid-file=" + dir + "/pid",
			"--bind-address=127.0.0.1", "--port=" + strconv.Itoa(port), "--max-connections=400",
		})
		if !o.Durable {
			args = append(args, "--innodb-flush-log-at-trx-commit=0", "--innodb-flush-method=nosync", "--innodb-doublewrite=0")
		}
		return append(args, o.Args...)
	}
	return &p, nil
}

// asRoot: MariaDB and MySQL run as root only if told so.
func asRoot() []string {
	if os.Geteuid() == 0 {
		return []string{"--user=root"}
	}
	return nil
}

// look finds the first of names in PATH or /usr/sbin, which is not in everybody's PATH.
func look(names ...string) string {
	for _, name := range names {
		for _, file := range []string{name, "/usr/sbin/" + name} {
			if p, err := exec.LookPath(file); err == nil {
				return p
			}
		}
	}
	return ""
}
