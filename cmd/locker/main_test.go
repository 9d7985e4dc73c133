package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/stretchr/testify/require"

	"github.com/locker-go/locker"
	"github.com/locker-go/locker/internal/testdb"
)

// The tests run real processes: this test binary is the command too.
func TestMain(m *testing.M) {
	if os.Getenv("LOCKER_TEST_MAIN") != "" {
		_ = os.Unsetenv("LOCKER_TEST_MAIN")
		main()
	}
	for _, v := range []string{"LOCKER_DSN", "LOCKER_RESOURCE", "LOCKER_OWNER", "LOCKER_TOKEN"} {
		_ = os.Unsetenv(v)
	}
	os.Exit(m.Run())
}

// soon is how long a test waits for what should happen at once, on a machine that is busy with other things.
const soon = 30 * time.Second

// world is a database with a lock table, and the command's DSN for it.
type world struct {
	t     *testing.T
	dsn   string
	db    *database
	table *locker.Table
	env   []string
}

// newWorld makes the table with the command itself.
func newWorld(t *testing.T, e testdb.Engine) *world {
	w := emptyWorld(t, e)
	require.Equal(t, 0, w.run("init").code)
	return w
}

// emptyWorld has no table yet.
func emptyWorld(t *testing.T, e testdb.Engine) *world {
	t.Helper()
	w := &world{t: t}
	switch e.Name {
	case "sqlite":
		w.dsn = "sqlite:" + filepath.Join(t.TempDir(), "a b?c=1#d%41&.db")
	case "postgres":
		w.dsn = e.DSN(t)
	case "mysql":
		w.dsn = mysqlURL(t, e.DSN(t))
	}
	var err error
	w.db, err = parseDSN(w.dsn)
	require.NoError(t, err)
	t.Cleanup(func() { w.db.db.Close() })
	w.table, err = locker.New(w.db.db, w.db.dialect)
	require.NoError(t, err)
	return w
}

func mysqlURL(t *testing.T, dsn string) string {
	c, err := mysql.ParseDSN(dsn)
	require.NoError(t, err)
	u := url.URL{Scheme: "mysql", User: url.UserPassword(c.User, c.Passwd), Host: c.Addr, Path: "/" + c.DBName}
	if c.Net == "unix" {
		u.Host, u.RawQuery = "", "socket="+url.QueryEscape(c.Addr)
	}
	return u.String()
}

// onEngines runs test on a fresh table in each engine.
func onEngines(t *testing.T, test func(t *testing.T, w *world)) {
	for _, e := range testdb.Engines(t) {
		t.Run(e.Name, func(t *testing.T) {
			t.Parallel()
			test(t, newWorld(t, e))
		})
	}
}

func onSQLite(t *testing.T) *world { return newWorld(t, testdb.SQLite(t)) }

// process is a locker that runs.
type process struct {
	*exec.Cmd
	t      *testing.T
	out    string // the file of its stdout
	errs   string
	exited chan struct{}
}

// command is a locker that is not started yet. Its output goes to files: whoever inherits them does not keep it waiting.
func (w *world) command(args ...string) *process {
	w.t.Helper()
	dir := w.t.TempDir()
	p := &process{Cmd: exec.Command(os.Args[0], args...), t: w.t, out: filepath.Join(dir, "out"), errs: filepath.Join(dir, "err"), exited: make(chan struct{})}
	p.Env = append(os.Environ(), "LOCKER_TEST_MAIN=1", "GORACE=atexit_sleep_ms=0")
	if w.dsn != "" {
		p.Env = append(p.Env, "LOCKER_DSN="+w.dsn)
	}
	p.Env = append(p.Env, w.env...)
	return p
}

func (p *process) launch() *process {
	p.t.Helper()
	for _, f := range []struct {
		name string
		to   func(*os.File)
		set  bool
	}{
		{p.out, func(f *os.File) { p.Stdout = f }, p.Stdout != nil},
		{p.errs, func(f *os.File) { p.Stderr = f }, p.Stderr != nil},
	} {
		if f.set {
			continue
		}
		file, err := os.Create(f.name)
		require.NoError(p.t, err)
		defer file.Close()
		f.to(file)
	}
	require.NoError(p.t, p.Start())
	go func() {
		_ = p.Wait()
		close(p.exited)
	}()
	p.t.Cleanup(func() {
		running := p.Process.Kill() == nil
		<-p.exited
		if p.t.Failed() && (running || p.stderr() != "") {
			p.t.Logf("%q: %v\nstdout: %s\nstderr: %s", p.Args[1:], p.ProcessState, p.stdout(), p.stderr())
		}
	})
	return p
}

func (w *world) start(args ...string) *process { w.t.Helper(); return w.command(args...).launch() }

// end waits for the exit code; 128+n if signal n ended it, which only some tests expect.
func (p *process) end() int {
	p.t.Helper()
	select {
	case <-p.exited:
	case <-time.After(2 * soon):
		p.t.Fatalf("%q is still running; stderr: %s", p.Args[1:], p.stderr())
	}
	return p.ProcessState.ExitCode()
}

func (p *process) stdout() string { return read(p.out) }
func (p *process) stderr() string { return read(p.errs) }

func read(file string) string {
	b, _ := os.ReadFile(file)
	return string(b)
}

// result is what a locker that has ended left behind.
type result struct {
	code     int
	out, err string
}

func (w *world) run(args ...string) result {
	w.t.Helper()
	p := w.start(args...)
	code := p.end()
	return result{code, p.stdout(), p.stderr()}
}

// eventually waits until what holds.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(soon); !holds(); {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", soon, what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// holder is who holds resource now, the zero Record if nobody does.
func (w *world) holder(resource string) locker.Record {
	w.t.Helper()
	rec, err := w.table.Get(ctx(w.t), resource)
	if !errors.Is(err, locker.ErrNotHeld) {
		require.NoError(w.t, err)
	}
	return rec
}

// hold takes resource for somebody else.
func (w *world) hold(resource string, ttl time.Duration) locker.Record {
	w.t.Helper()
	rec, err := w.table.Acquire(ctx(w.t), resource, "somebody else", ttl)
	require.NoError(w.t, err)
	return rec
}

func (w *world) free(rec locker.Record) {
	w.t.Helper()
	require.NoError(w.t, w.table.Release(ctx(w.t), rec))
}

func ctx(t *testing.T) context.Context {
	c, cancel := context.WithTimeout(context.Background(), soon)
	t.Cleanup(cancel)
	return c
}

// nobody is an address where nobody listens.
func nobody(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	return l.Addr().String()
}

func lines(s string) []string { return strings.Split(strings.TrimSuffix(s, "\n"), "\n") }

func format(v string, args ...any) string { return fmt.Sprintf(v, args...) }
