package testdb

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// galera is one node of a cluster.
var galera = &kind{
	name: "mysql", driver: "mysql",
	account: "mysql", // root's nodes fail to hand their data over
	stop:    syscall.SIGTERM, crash: "KILL",
	identity: "SELECT @@datadir FROM information_schema.global_status WHERE variable_name = 'wsrep_ready' AND variable_value = 'ON'",
	init:     "CREATE DATABASE IF NOT EXISTS locker",
	dsn:      func(port int) string { return fmt.Sprintf("root@tcp(127.0.0.1:%d)/", port) },
}

// Galera starts a MariaDB Galera cluster for this test alone: servers that have the same databases, each of which takes writes. It is
// removed at the test's end. A node may be stopped, killed and started again while another one runs.
//
// That takes some seconds, so the test is skipped unless LOCKER_TEST_ENGINES, a list, names "galera". It is also skipped where Galera
// is not installed, or fails if LOCKER_TEST_REQUIRE names it.
func Galera(t testing.TB, nodes int, o Options) []*Server {
	t.Helper()
	c := needGalera(t)
	var all []*Server
	for range nodes {
		s, err := c.start(o)
		if err != nil {
			t.Fatalf("testdb: Galera node %d of %d: %v", len(all)+1, nodes, err)
		}
		s.t = t
		t.Cleanup(s.remove)
		all = append(all, s)
	}
	for i, s := range all {
		if err := s.joined(nodes); err != nil {
			t.Fatalf("testdb: Galera node %d of %d: %v\n%s", i+1, nodes, err, s.log())
		}
	}
	return all
}

func needGalera(t testing.TB) *cluster {
	t.Helper()
	if !slices.Contains(strings.Split(os.Getenv("LOCKER_TEST_ENGINES"), ","), "galera") {
		t.Skip("testdb: takes a Galera cluster, which LOCKER_TEST_ENGINES does not name")
	}
	c, err := findGalera()
	if err != nil {
		(&kind{name: "galera"}).missing(t, err)
	}
	return c
}

// A cluster is what its nodes are made from.
type cluster struct {
	server, install, provider string
	members                   []string // where each node listens to the others
}

func findGalera() (*cluster, error) {
	if !canStart {
		return nil, errors.New("testdb starts no servers on this system")
	}
	c := &cluster{server: look("mariadbd"), install: look("mariadb-install-db")}
	if c.server == "" || c.install == "" {
		return nil, errors.New("no MariaDB server (mariadbd, mariadb-install-db) in PATH or /usr/sbin")
	}
	for _, pattern := range []string{"/usr/lib*/galera*/libgalera_smm.so", "/usr/lib*/libgalera_smm.so"} {
		if all, _ := filepath.Glob(pattern); c.provider == "" && len(all) > 0 {
			c.provider = all[0]
		}
	}
	if c.provider == "" {
		return nil, errors.New("no libgalera_smm.so in /usr/lib/galera (Debian: galera-4)")
	}
	if look("rsync") == "" || look("wsrep_sst_rsync") == "" {
		return nil, errors.New("no rsync or wsrep_sst_rsync in PATH, for a node that joins (Debian: rsync, mariadb-server)")
	}
	if os.Geteuid() == 0 {
		if _, err := user.Lookup(galera.account); err != nil {
			return nil, fmt.Errorf("no account to run Galera as: %w", err)
		}
	}
	return c, nil
}

// start makes a folder with a janitor and runs one node more in it.
func (c *cluster) start(o Options) (*Server, error) {
	tmp, err := filepath.EvalSymlinks(os.TempDir())
	if err != nil {
		return nil, err
	}
	s := &Server{kind: galera, prog: c.node(), o: o, dir: filepath.Join(tmp, "locker-galera-"+rand.Text()[:10])}
	s.o.Env = append(slices.Clone(o.Env), "TMPDIR="+s.dir)
	if err := s.startJanitor(); err != nil {
		return nil, fmt.Errorf("making %s: %w", s.dir, err)
	}
	// All of the folder is the account's: for the socket, temporary tables, what the scripts that transfer data note down.
	if err := errors.Join(chown(s.dir, galera.account), s.fill()); err != nil {
		s.remove()
		return nil, err
	}
	return s, nil
}

func (c *cluster) node() *program {
	self := len(c.members)
	c.members = append(c.members, "")
	return &program{
		init: func(dir string, o Options) []string {
			if self > 0 {
				return []string{"true"} // it gets its data from the others
			}
			return append([]string{
				c.install, "--no-defaults", "--datadir=" + dir + "/data", "--auth-root-authentication-method=normal", "--skip-test-db",
			}, o.Init...)
		},
		serve: func(dir string, port int, o Options) []string {
			// Other ports at each start, because somebody may have taken them. One member that runs is enough to find the others.
			group, state, rows := freeAddr(), freeAddr(), freeAddr()
			c.members[self] = group
			others := slices.Concat(c.members[:self], c.members[self+1:])
			args := []string{
				c.server, "--no-defaults", "--skip-name-resolve",
				"--datadir=" + dir + "/data", "--socket=" + dir + "/s.sock", "--pid-file=" + dir + "/pid",
				"--bind-address=127.0.0.1", "--port=" + strconv.Itoa(port), "--max-connections=400",
				"--binlog-format=ROW", "--innodb-autoinc-lock-mode=2",
				"--wsrep-on=ON", "--wsrep-provider=" + c.provider, "--wsrep-cluster-name=locker",
				"--wsrep-cluster-address=gcomm://" + strings.Join(others, ","), // nobody: a new cluster
				"--wsrep-node-address=127.0.0.1", "--wsrep-sst-method=rsync", "--wsrep-sst-receive-address=" + state,
				"--wsrep-provider-options=gcache.size=16M;gmcast.listen_addr=tcp://" + group + ";base_port=" + group[strings.LastIndex(group, ":")+1:] +
					";ist.recv_addr=" + rows,
			}
			if !o.Durable {
				args = append(args, "--innodb-flush-log-at-trx-commit=0", "--innodb-flush-method=nosync", "--innodb-doublewrite=0")
			}
			return append(args, o.Args...)
		},
	}
}

// joined waits until the node is one of so many and has all that they have.
func (s *Server) joined(nodes int) error {
	db, err := sql.Open(s.kind.driver, s.DSN())
	if err != nil {
		return err
	}
	defer db.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for {
		var is string
		err := db.QueryRowContext(ctx, `SELECT GROUP_CONCAT(variable_value ORDER BY variable_name) FROM information_schema.global_status
			WHERE variable_name IN ('wsrep_cluster_size', 'wsrep_local_state_comment')`).Scan(&is)
		if is == fmt.Sprint(nodes, ",Synced") {
			return nil
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("it should be one of %d, but is %q (%w)", nodes, is, errors.Join(ctx.Err(), err))
		}
	}
}

// freeAddr is a free port with its address, or with port 0, which the server will refuse.
func freeAddr() string {
	port, _ := freePort()
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
}
