package testdb

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
)

// Options are those of a private server. The zero value is a fast server that would lose data with the machine.
type Options struct {
	Args    []string // more arguments for the server: "-c", "max_connections=10" for postgres, "--sql-mode=ANSI" for mysql
	Init    []string // more arguments for initdb or mariadb-install-db
	Env     []string // more environment, "NAME=value"
	Durable bool     // flush at each commit

	// Both skip the test where libfaketime is not installed. A Clock that SetClock can move is read from a file at every look, and in
	// a server of many threads that goes wrong now and then (MariaDB told the true time 53 times in 80,000; PostgreSQL never did).
	Clock    string // how far the server's clock is off, for good: "+1h"
	Faketime bool   // let SetClock move the server's clock
}

// A Server is a private one, for tests that break, restart or reconfigure it. Its methods are for the test's own goroutine.
type Server struct {
	t       testing.TB
	kind    *kind
	prog    *program
	o       Options
	dir     string
	port    int
	janitor *exec.Cmd
	hold    *os.File // the janitor reads it; at its end, at the latest with this process, the janitor cleans up

	cmd   *exec.Cmd // nil: not running
	alive *os.File  // ends when the server and all its children are gone
}

// janitor makes a folder, $1, and removes it when standard input ends. What it reads there is the process to end first, the leader of
// a process group, and how. It gives the group time to end by itself: a killed PostgreSQL would leave shared memory behind. (Z: ended,
// but nobody has collected it yet.) It ignores what might end it before its time, and is not in the terminal's process group.
const janitor = `
trap '' HUP INT QUIT TERM PIPE
mkdir -m 755 "$1" || exit
echo made
pid=
while read -r p s; do pid=$p sig=$s; done
if [ -n "$pid" ]; then
	kill -s "$sig" "$pid"
	kill -s CONT "$pid"
	n=0
	while kill -s 0 -- "-$pid" && ! grep -q ') Z ' "/proc/$pid/stat" && [ "$n" -lt 60 ]; do n=$((n + 1)); sleep 0.05; done
	kill -s KILL -- "-$pid"
	rm -f "/dev/shm/faketime_shm_$pid" "/dev/shm/sem.faketime_sem_$pid"
fi
n=0
until rm -rf "$1" || [ "$n" -ge 50 ]; do n=$((n + 1)); sleep 0.1; done
`

// tellAndExec tells the janitor its process id and the signal that ends it, $1, and becomes the rest: it never runs unknown to the
// janitor.
const tellAndExec = `echo "$$ $1" >&3; shift; exec "$@" 3>&-`

// Start starts a server for this test alone, "postgres" or "mysql". It is removed at the test's end. The test is skipped where that
// server is not installed, or fails if LOCKER_TEST_REQUIRE names it and no server in the environment stands for it.
func Start(t testing.TB, engine string, o Options) *Server {
	t.Helper()
	k := map[string]*kind{"postgres": postgres, "mysql": maria}[engine]
	if k == nil {
		t.Fatalf("testdb: there is no server for %q", engine)
	}
	if _, err := k.find(); err != nil {
		if os.Getenv(k.env) != "" {
			t.Skipf("testdb: this test needs a server of its own, and there is %v", err)
		}
		k.missing(t, err)
	}
	if (o.Faketime || o.Clock != "") && faketimeLib() == "" {
		t.Skip("testdb: libfaketime (package faketime) is not installed")
	}
	s, err := start(k, o)
	if err != nil {
		t.Fatalf("testdb: %v", err)
	}
	s.t = t
	t.Cleanup(s.remove)
	return s
}

// DSN returns the DSN of the server's one ready-made database, which is empty. Engine().DSN makes fresh ones.
func (s *Server) DSN(params ...string) string {
	dsn := s.kind.dsn(s.port)
	if s.kind.init != "" {
		dsn += "locker"
	}
	return withParams(dsn, params...)
}

// Engine is for fresh schemas on this server.
func (s *Server) Engine() Engine {
	return Engine{Name: s.kind.name, Driver: s.kind.driver, server: func() (string, error) { return s.kind.dsn(s.port), nil }}
}

// Port returns the port on 127.0.0.1, which stays over a restart.
func (s *Server) Port() int { return s.port }

// PID returns the process id of the server, 0 if it is not running.
func (s *Server) PID() int {
	if s.cmd == nil {
		return 0
	}
	return s.cmd.Process.Pid
}

// Stop ends the server in good order: open transactions are rolled back, the rest is on disk. The folder stays.
func (s *Server) Stop() { s.t.Helper(); s.end(s.kind.stop) }

// Kill ends the server as kill -9 does. The folder stays.
func (s *Server) Kill() { s.t.Helper(); s.end(syscall.SIGKILL) }

// Start starts the server again, with the same data, port and options, and returns when it answers.
func (s *Server) Start() {
	s.t.Helper()
	if s.cmd != nil {
		return
	}
	if err := s.up(false); err != nil {
		s.t.Fatalf("testdb: starting again: %v", err)
	}
}

// SetClock moves the clock of a server started with Faketime, from its next statement on: "+1h", "-3600" (seconds), "+0 x0" stands
// still, "+0" is the true time. The server's own timers and this process keep the true time.
func (s *Server) SetClock(spec string) {
	s.t.Helper()
	if err := s.writeClock(spec); err != nil {
		s.t.Fatalf("testdb: %v", err)
	}
}

func (s *Server) writeClock(spec string) error {
	file := filepath.Join(s.dir, "clock")
	// The server reads it at every look at the clock: it must never see half of it.
	if err := os.WriteFile(file+".new", []byte(spec+"\n"), 0o644); err != nil {
		return err
	}
	return os.Rename(file+".new", file)
}

func faketimeLib() string {
	for _, pattern := range []string{"/usr/lib/*/faketime/libfaketime.so.1", "/usr/lib/faketime/libfaketime.so.1"} {
		if all, _ := filepath.Glob(pattern); len(all) > 0 {
			return all[0]
		}
	}
	return ""
}

// start makes a folder with a janitor, fills it and runs a server in it.
func start(k *kind, o Options) (*Server, error) {
	prog, err := k.find()
	if err != nil {
		return nil, err
	}
	// Not t.TempDir: as root its parent is closed to the account that the server runs as. Without links: the server will say its name.
	tmp, err := filepath.EvalSymlinks(os.TempDir())
	if err != nil {
		return nil, err
	}
	s := &Server{kind: k, prog: prog, o: o, dir: filepath.Join(tmp, "locker-"+k.name+"-"+rand.Text()[:10])}
	if err := s.startJanitor(); err != nil {
		return nil, fmt.Errorf("making %s: %w", s.dir, err)
	}
	if err := s.fill(); err != nil {
		s.remove()
		return nil, err
	}
	return s, nil
}

func (s *Server) fill() error {
	data := s.dir + "/data"
	if err := errors.Join(os.Mkdir(data, 0o700), chown(data, s.kind.account), s.writeClock("+0")); err != nil {
		return err
	}
	command := s.prog.init(s.dir, s.o)
	cmd, alive, err := s.spawn("TERM", command, false)
	if err != nil {
		return err
	}
	err = cmd.Wait()
	alive.Close()
	s.tell()
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", command[0], err, s.log())
	}
	if err := s.up(true); err != nil || s.kind.init == "" {
		return err
	}
	return execute(s.kind.driver, s.kind.dsn(s.port), s.kind.init)
}

func (s *Server) startJanitor() error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	said, says, err := os.Pipe()
	if err != nil {
		return errors.Join(err, w.Close())
	}
	defer said.Close()
	defer says.Close()
	cmd := exec.Command("/bin/sh", "-c", janitor, "sh", s.dir)
	cmd.Stdin, cmd.Stdout, cmd.Stderr, cmd.Dir = r, says, says, "/"
	if err = isolate(cmd, ""); err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return errors.Join(err, w.Close())
	}
	says.Close()
	if word, err := bufio.NewReader(said).ReadString('\n'); err != nil || word != "made\n" {
		return errors.Join(errors.New(word), w.Close(), cmd.Wait())
	}
	s.janitor, s.hold = cmd, w
	return nil
}

// tell informs the janitor that there is no process to end any more.
func (s *Server) tell() { _, _ = io.WriteString(s.hold, "\n") }

// spawn starts a command in the folder, in the account and process group it shall have; the janitor ends it by signal. The file ends
// when all that holds the other end of it, the command and its descendants, has ended.
func (s *Server) spawn(signal string, command []string, clock bool) (*exec.Cmd, *os.File, error) {
	log, err := os.OpenFile(s.dir+"/log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, nil, err
	}
	defer log.Close()
	alive, held, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	defer held.Close()
	if clock { // by env, so that it does not reach the shell
		from := []string{"FAKETIME=" + s.o.Clock}
		if s.o.Faketime {
			from = []string{"FAKETIME_TIMESTAMP_FILE=" + s.dir + "/clock", "FAKETIME_NO_CACHE=1"}
		}
		command = slices.Concat([]string{
			"env", "LD_PRELOAD=" + faketimeLib(), "DONT_FAKE_MONOTONIC=1", "FAKETIME_DONT_FAKE_MONOTONIC=1",
		}, from, command)
	}
	cmd := exec.Command("/bin/sh", append([]string{"-c", tellAndExec, "sh", signal}, command...)...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = s.dir, log, log
	cmd.Env = append(append(os.Environ(), "LC_ALL=C"), s.o.Env...)
	cmd.ExtraFiles = []*os.File{s.hold, held} // 3 and 4
	if err = isolate(cmd, s.kind.account); err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return nil, nil, errors.Join(err, alive.Close())
	}
	return cmd, alive, nil
}

var errEnded = errors.New("the server ended before it answered")

// up starts the server and returns when it answers. One that ends at once is tried again: somebody may have taken the free port, or
// the shared memory of a server that was killed is in the way for a moment.
func (s *Server) up(newPort bool) (err error) {
	for try := range 5 {
		if try > 0 {
			time.Sleep(100 * time.Millisecond)
		}
		if newPort {
			if s.port, err = freePort(); err != nil {
				return err
			}
		}
		if err = s.run(); !errors.Is(err, errEnded) {
			return err
		}
	}
	return err
}

func (s *Server) run() (err error) {
	if s.cmd, s.alive, err = s.spawn(s.kind.crash, s.prog.serve(s.dir, s.port, s.o), s.o.Faketime || s.o.Clock != ""); err != nil {
		return err
	}
	deadline := time.Now().Add(time.Minute)
	for {
		if err = s.answers(); err == nil {
			return nil
		}
		if s.ended(5 * time.Millisecond) {
			s.reap()
			return fmt.Errorf("%w\n%s", errEnded, s.log())
		}
		if time.Now().After(deadline) {
			killGroup(s.PID())
			s.reap()
			return fmt.Errorf("the server does not answer: %w\n%s", err, s.log())
		}
	}
}

// answers says whether this very server, not another one on the same port, takes statements.
func (s *Server) answers() error {
	addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port))
	c, err := net.DialTimeout("tcp", addr, time.Second) // first: the MySQL driver logs what it cannot connect to
	if err != nil {
		return err
	}
	c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	var db *sql.DB
	if s.kind.driver == "mysql" {
		conf, err := mysql.ParseDSN(s.kind.dsn(s.port))
		if err != nil {
			return err
		}
		conf.Logger = &mysql.NopLogger{}
		connector, err := mysql.NewConnector(conf)
		if err != nil {
			return err
		}
		db = sql.OpenDB(connector)
	} else if db, err = sql.Open(s.kind.driver, s.kind.dsn(s.port)); err != nil {
		return err
	}
	defer db.Close()
	var data string
	if err := db.QueryRowContext(ctx, s.kind.identity).Scan(&data); err != nil {
		return err
	}
	if filepath.Clean(data) != s.dir+"/data" {
		return fmt.Errorf("port %d is that of %s", s.port, data)
	}
	return nil
}

// ended waits at most d for the end of the server and of all its children.
func (s *Server) ended(d time.Duration) bool {
	if err := s.alive.SetReadDeadline(time.Now().Add(d)); err != nil {
		return false
	}
	_, err := s.alive.Read(make([]byte, 1))
	return errors.Is(err, io.EOF)
}

func (s *Server) reap() {
	_ = s.cmd.Wait() // how it ended is no news
	s.alive.Close()
	s.tell()
	s.cmd, s.alive = nil, nil
}

func (s *Server) end(sig syscall.Signal) {
	s.t.Helper()
	if s.cmd == nil {
		return
	}
	_ = s.cmd.Process.Signal(sig)
	if !s.ended(30 * time.Second) {
		killGroup(s.PID())
		s.t.Errorf("testdb: the server did not end after %v\n%s", sig, s.log())
	}
	s.reap()
}

// remove lets the janitor do its work, now, and waits for it.
func (s *Server) remove() {
	s.hold.Close()
	if s.cmd != nil {
		_ = s.cmd.Wait()
		s.alive.Close()
		s.cmd, s.alive = nil, nil
	}
	_ = s.janitor.Wait()
}

// log returns the end of what the server said.
func (s *Server) log() []byte {
	b, _ := os.ReadFile(s.dir + "/log")
	lines := bytes.SplitAfter(b, []byte("\n"))
	return bytes.Join(lines[max(0, len(lines)-20):], nil)
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}
