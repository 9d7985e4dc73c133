//go:build unix

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/locker-go/locker/internal/testdb"
)

// The exit code is the command's own, or one that says what kept it from running.
func TestRunExitCode(t *testing.T) {
	w := onSQLite(t)
	dir := t.TempDir()
	file := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(text), mode))
		return path
	}
	plain := file("plain", "#!/bin/sh\n", 0o644)
	noInterpreter := file("no-interpreter", "#!/not/there\n", 0o755)
	noFormat := file("no-format", "\x00\x01", 0o755)
	w.env = []string{"PATH=" + os.Getenv("PATH") + ":" + dir}

	for _, n := range []int{0, 1, 2, 7, 64, 69, 74, 75, 126, 127, 255} {
		assert.Equal(t, result{n, "", ""}, w.run("run", "r", "--", "sh", "-c", "exit "+strconv.Itoa(n)))
	}
	for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM, syscall.SIGINT, syscall.SIGSEGV} {
		assert.Equal(t, 128+int(sig), w.run("run", "r", "--", "sh", "-c", format("kill -%d $$", sig)).code)
	}
	for command, code := range map[string]int{
		"no-such-command": exitNotFound, "/not/there": exitNotFound, "": exitNotFound, plain + "/x": exitNotExecutable,
		plain: exitNotExecutable, "plain": exitNotExecutable, dir: exitNotExecutable,
		noInterpreter: exitNotExecutable, noFormat: exitNotExecutable,
	} {
		r := w.run("run", "r", "--min-hold", "1h", "--", command)
		assert.Equal(t, code, r.code, "%q", command)
		assert.Contains(t, r.err, command)
		assert.Len(t, lines(r.err), 1)
		assert.Zero(t, w.holder("r"), "%q: nothing has run, so nothing is held", command)
	}

	w.hold("held", time.Hour)
	for args, code := range map[string]int{"": 75, "-E 0": 0, "-E9": 9, "--conflict-exit-code=255": 255, "--wait 100ms": 75, "--wait 100ms -E 3": 3} {
		r := w.run(append(append([]string{"run"}, strings.Fields(args)...), "held", "--", "echo", "ran")...)
		assert.Equal(t, code, r.code, args)
		assert.Empty(t, r.out)
		if code == 0 {
			assert.Empty(t, r.err, "a skip that was asked for is silent")
		} else {
			assert.Contains(t, r.err, `"held" is held by "somebody else"`)
		}
	}

	at := nobody(t)
	for _, dsn := range []string{"postgres://" + at + "/db", "mysql://" + at + "/db", "sqlite:" + dir + "/not/there.db", "sqlite:" + plain} {
		for _, wait := range []string{"0s", "100ms"} {
			r := w.run("--dsn", dsn, "run", "--wait", wait, "r", "--", "echo", "ran")
			assert.Equal(t, exitUnavailable, r.code, dsn)
			assert.Empty(t, r.out)
			assert.NotEmpty(t, r.err)
		}
	}
}

// The command gets exactly the arguments, environment and files that it would have got without locker.
func TestRunPassesEverythingOn(t *testing.T) {
	w := onSQLite(t)
	args := []string{"-v", "--json", "a b", "", "'\"`$(x)\\", "--", "*", "caf\xe9", "-h", "--wait=1s", "<&>"}
	for _, before := range [][]string{{"run", "r", "--"}, {"run", "r"}, {"run", "--ttl", "5s", "r", "--wait", "1s", "--"}, {"run", "--", "r"}} {
		r := w.run(append(append(before, "printf", "%s\\n"), args...)...)
		assert.Equal(t, result{0, strings.Join(args, "\n") + "\n", ""}, r, "%q", before)
	}

	p := w.command("run", "r", "--", "cat")
	p.Stdin = strings.NewReader("one\ntwo\n")
	assert.Equal(t, 0, p.launch().end())
	assert.Equal(t, "one\ntwo\n", p.stdout())

	w.env = []string{"FOO=bar", "LOCKER_TOKEN=7", "LOCKER_OWNER=x"}
	r := w.run("run", "re source", "--", "sh", "-c",
		`echo "$FOO|$LOCKER_RESOURCE|$LOCKER_OWNER|$LOCKER_TOKEN"; LOCKER_TEST_MAIN=1 "$0" get --json "$LOCKER_RESOURCE"`, os.Args[0])
	require.Equal(t, 0, r.code, r.err)
	first, second, _ := strings.Cut(r.out, "\n")
	got := decode(t, second)
	assert.Equal(t, format("bar|re source|%v|%v", got["owner"], got["token"]), first)

	// What acquire prints is for eval, and then renew and release need no flags.
	script := `set -e; export LOCKER_TEST_MAIN=1
eval "$("$0" acquire "it's" --ttl 1h)"
"$0" renew "it's" --json
"$0" release "it's"
! "$0" release "it's"
! "$0" release other`
	out, err := exec.Command("sh", "-c", "LOCKER_DSN='"+strings.ReplaceAll(w.dsn, "'", `'\''`)+"'; export LOCKER_DSN\n"+script, os.Args[0]).Output()
	require.NoError(t, err)
	renewed := decode(t, string(out))
	assert.Equal(t, "it's", renewed["resource"])
	left, err := renewed["remaining_ms"].(json.Number).Int64()
	require.NoError(t, err)
	assert.Greater(t, left, time.Minute.Milliseconds()*59, "the TTL is that of acquire")
}

// eval of nothing succeeds: the work must not run without the lock.
func TestAcquireInAShellThatIsRefused(t *testing.T) {
	w := onSQLite(t)
	for _, c := range []struct{ dsn, how string }{{w.dsn, "held"}, {"mysql://nobody@127.0.0.1:1/x", "unreachable"}} {
		script := `export LOCKER_TEST_MAIN=1 LOCKER_DSN="$1"
[ "$2" != held ] || "$0" acquire r --owner other >/dev/null
if grant=$("$0" acquire r); then eval "$grant"; echo RAN; fi`
		out, err := exec.Command("sh", "-c", script, os.Args[0], c.dsn, c.how).Output()
		require.NoError(t, err)
		assert.NotContains(t, string(out), "RAN", c.how)
	}
	code := func(args ...string) int {
		p := exec.Command("sh", append([]string{"-c", `LOCKER_DSN= LOCKER_TEST_MAIN=1 exec "$0" "$@"`, os.Args[0]}, args...)...)
		_ = p.Run()
		return p.ProcessState.ExitCode()
	}
	assert.Equal(t, 64, code("get", "r"), "a variable that came out empty is not a file of one's own")

}

// Files that locker has open for itself do not leak into the command.
func TestRunLeaksNoFiles(t *testing.T) {
	if _, err := os.Stat("/proc/self/fd"); err != nil {
		t.Skip("no /proc")
	}
	w := onSQLite(t)
	r := w.run("run", "r", "--", "sh", "-c", "ls -l /proc/$$/fd")
	assert.NotContains(t, r.out, ".db")
	assert.NotContains(t, r.out, "socket:")
}

// script is a shell command that first writes its pid, which is that of the process group, to a file; body has it as $0.
type script struct {
	t    *testing.T
	file string
	args []string
}

func newScript(t *testing.T, body string, args ...string) *script {
	t.Helper()
	file := filepath.Join(t.TempDir(), "pid")
	s := &script{t, file, append([]string{"sh", "-c", `echo $$ > "$0.new" && mv "$0.new" "$0"; ` + body, file}, args...)}
	t.Cleanup(func() {
		if _, err := os.Stat(file); err == nil {
			_ = syscall.Kill(-s.group(), syscall.SIGKILL)
		}
	})
	return s
}

// group waits for the script to start and returns its process group.
func (s *script) group() int {
	s.t.Helper()
	eventually(s.t, "the command starts", func() bool { return read(s.file) != "" })
	id, err := strconv.Atoi(strings.TrimSpace(read(s.file)))
	require.NoError(s.t, err)
	return id
}

func (s *script) started() bool { return read(s.file) != "" }

// alive reports whether the group has a process; dead ones that nobody has reaped yet do not count.
func alive(group int) bool {
	out, _ := exec.Command("ps", "-eo", "pgid=,stat=").Output()
	for _, line := range lines(string(out)) {
		if f := strings.Fields(line); len(f) == 2 && f[0] == strconv.Itoa(group) && f[1][0] != 'Z' {
			return true
		}
	}
	return false
}

// Signals reach the command, and locker ends as it does, without leaving it or the lock behind.
func TestRunPassesSignalsOn(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT} {
		t.Run(sig.String(), func(t *testing.T) {
			t.Parallel()
			w := onSQLite(t)
			s := newScript(t, "ulimit -c 0; exec sleep 100")
			p := w.start(append([]string{"run", "r", "--"}, s.args...)...)
			group := s.group()
			require.NotZero(t, w.holder("r"))
			require.NoError(t, p.Process.Signal(sig))
			assert.Equal(t, 128+int(sig), p.end())
			assert.False(t, alive(group))
			assert.Zero(t, w.holder("r"))
			assert.Empty(t, p.stderr())
		})
	}
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGWINCH} {
		t.Run("caught "+sig.String(), func(t *testing.T) {
			t.Parallel()
			w := onSQLite(t)
			s := newScript(t, format(`trap 'echo caught; exit 5' %d; touch "$0.ready"; while :; do sleep 0.05; done`, sig))
			p := w.start(append([]string{"run", "r", "--"}, s.args...)...)
			eventually(t, "the trap is set", func() bool { _, err := os.Stat(s.file + ".ready"); return err == nil })
			require.NoError(t, p.Process.Signal(sig))
			assert.Equal(t, 5, p.end())
			assert.Equal(t, "caught\n", p.stdout())
			assert.Zero(t, w.holder("r"))
		})
	}
}

// Under nohup SIGHUP stays ignored, for locker and for the command.
func TestRunUnderNohup(t *testing.T) {
	w := onSQLite(t)
	s := newScript(t, `kill -HUP $$; touch "$0.ready"; while [ ! -e "$0.go" ]; do sleep 0.05; done; exit 6`)
	p := w.command(append([]string{"-c", `trap "" HUP; exec "$0" "$@"`, os.Args[0], "run", "r", "--"}, s.args...)...)
	p.Path, p.Args = "/bin/sh", append([]string{"sh"}, p.Args[1:]...)
	p.launch()
	eventually(t, "the command has survived it", func() bool { _, err := os.Stat(s.file + ".ready"); return err == nil })
	require.NoError(t, p.Process.Signal(syscall.SIGHUP))
	require.NoError(t, os.WriteFile(s.file+".go", nil, 0o600))
	assert.Equal(t, 6, p.end())
}

// What the command leaves in the background keeps neither locker nor the lock, though it has inherited a pipe.
func TestRunLeavesBackgroundAlone(t *testing.T) {
	w := onSQLite(t)
	r, pipe, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close()
	s := newScript(t, "sleep 60 & exit 3")
	p := w.command(append([]string{"run", "r", "--ttl", "5s", "--"}, s.args...)...)
	p.Stdout, p.Stderr = pipe, pipe
	begin := time.Now()
	p.launch()
	pipe.Close()
	assert.Equal(t, 3, p.end())
	assert.Less(t, time.Since(begin), soon)
	assert.Zero(t, w.holder("r"))
	assert.True(t, alive(s.group()), "left alone, as under a shell")
}

// While it waits locker can be ended at once; then nothing has run, and nothing is left in the table.
func TestRunWaitIsInterruptible(t *testing.T) {
	onEngines(t, func(t *testing.T, w *world) {
		for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
			rec := w.hold("r", time.Hour)
			p := w.start("run", "--wait", "10m", "r", "--", "echo", "ran")
			eventually(t, "locker waits", func() bool { return connected(p.Process.Pid) })
			begin := time.Now()
			require.NoError(t, p.Process.Signal(sig))
			assert.Equal(t, 128+int(sig), p.end())
			assert.Less(t, time.Since(begin), 5*time.Second)
			assert.Empty(t, p.stdout())
			assert.Equal(t, rec.Token, w.holder("r").Token)
			w.free(rec)
			assert.Zero(t, w.holder("r"))
		}
	})
}

// connected reports whether pid is at the database already; where nobody can tell, it is after a while.
func connected(pid int) bool {
	dir := format("/proc/%d/fd", pid)
	files, err := os.ReadDir(dir)
	if err != nil {
		time.Sleep(time.Second)
		return true
	}
	for _, f := range files {
		to, _ := os.Readlink(filepath.Join(dir, f.Name()))
		if strings.HasPrefix(to, "socket:") || strings.HasSuffix(to, ".db") {
			return true
		}
	}
	return false
}

// The whole process group is stopped when another has the lease: TERM at once, KILL soon after for those who ignore it, and nothing
// is written any more after the lease that was lost would have ended.
func TestRunStopsTheGroupWhenTheLeaseIsStolen(t *testing.T) {
	for name, prefix := range map[string]string{"ends at TERM": "", "ignores TERM": `trap "" TERM INT HUP; `} {
		t.Run(name, func(t *testing.T) {
			onEngines(t, func(t *testing.T, w *world) {
				// A grandchild works; the child only waits for it.
				s := newScript(t, prefix+`sh -c '`+prefix+`while :; do date +%s%N >> "$0.out"; sleep 0.05; done' "$0"; exit 0`)
				p := w.start(append([]string{"run", "--ttl", "2s", "r", "--"}, s.args...)...)
				group := s.group()
				eventually(t, "it works", func() bool { return strings.Count(read(s.file+".out"), "\n") > 5 })

				old, err := w.table.ForceRelease(ctx(t), "r")
				require.NoError(t, err)
				thief := w.hold("r", time.Hour)
				assert.Equal(t, exitLost, p.end())
				assert.False(t, alive(group))
				assert.Contains(t, p.stderr(), "lost")
				assert.Equal(t, thief.Token, w.holder("r").Token, "the new owner's lease is untouched")
				assertNoLineAfter(t, s.file+".out", old.ExpiresAt)
			})
		})
	}
}

// A lease that was lost without a sign before the command ended wins over its exit code.
func TestRunFindsTheLossAtTheEnd(t *testing.T) {
	for _, stolen := range []bool{false, true} {
		w := onSQLite(t)
		s := newScript(t, `while [ ! -e "$0.go" ]; do sleep 0.05; done; exit 0`)
		p := w.start(append([]string{"run", "--ttl", "1h", "r", "--"}, s.args...)...)
		s.group()
		_, err := w.table.ForceRelease(ctx(t), "r")
		require.NoError(t, err)
		if stolen {
			w.hold("r", time.Hour)
		}
		require.NoError(t, os.WriteFile(s.file+".go", nil, 0o600))
		assert.Equal(t, exitLost, p.end())
		assert.Contains(t, p.stderr(), "lost")
		assert.Equal(t, stolen, w.holder("r").Token != 0)
	}
}

func assertNoLineAfter(t *testing.T, file string, end time.Time) {
	t.Helper()
	all := lines(read(file))
	last, err := strconv.ParseInt(all[len(all)-1], 10, 64)
	require.NoError(t, err)
	assert.Less(t, last, end.UnixNano())
}

// If the database does not answer, TERM comes before the end of trust and KILL at it, and a renewal that gets through in between
// revives nothing.
func TestRunStopsTheCommandWhenTheDatabaseIsSilent(t *testing.T) {
	for _, revive := range []bool{false, true} {
		t.Run(format("answers again %v", revive), func(t *testing.T) {
			t.Parallel()
			w := onSQLite(t)
			s := newScript(t, `trap 'echo TERM > "$0.term"' TERM; touch "$0.ready"; while :; do date +%s%N >> "$0.out"; sleep 0.05; done`)
			p := w.start(append([]string{"run", "--ttl", "6s", "r", "--"}, s.args...)...)
			eventually(t, "the trap is set", func() bool { _, err := os.Stat(s.file + ".ready"); return err == nil })

			conn, err := w.db.db.Conn(ctx(t))
			require.NoError(t, err)
			defer conn.Close()
			_, err = conn.ExecContext(ctx(t), "BEGIN IMMEDIATE") // nobody else can write now
			require.NoError(t, err)
			rec := w.holder("r")
			eventually(t, "TERM", func() bool { return read(s.file+".term") != "" })
			info, err := os.Stat(s.file + ".term")
			require.NoError(t, err)
			assert.Less(t, info.ModTime(), rec.ExpiresAt)
			if revive {
				_, err = conn.ExecContext(ctx(t), "ROLLBACK")
				require.NoError(t, err)
			}
			assert.Equal(t, exitLost, p.end())
			assert.Contains(t, p.stderr(), "renew")
			assert.False(t, alive(s.group()))
			assertNoLineAfter(t, s.file+".out", rec.ExpiresAt)
		})
	}
}

// A locker that was stopped looks at the clock before anything else when it goes on.
func TestRunStoppedAndContinued(t *testing.T) {
	for _, ttl := range []string{"1s", "1h"} {
		t.Run(ttl, func(t *testing.T) {
			t.Parallel()
			w := onSQLite(t)
			s := newScript(t, `trap "" TERM; while [ ! -e "$0.go" ]; do sleep 0.05; done; exit 6`)
			p := w.start(append([]string{"run", "--ttl", ttl, "r", "--"}, s.args...)...)
			group := s.group()
			require.NoError(t, p.Process.Signal(syscall.SIGSTOP))
			if ttl == "1s" {
				eventually(t, "the lease ends", func() bool { return w.holder("r").Token == 0 })
				require.NoError(t, p.Process.Signal(syscall.SIGCONT))
				assert.Equal(t, exitLost, p.end())
				assert.False(t, alive(group))
				return
			}
			require.NoError(t, p.Process.Signal(syscall.SIGCONT))
			require.NoError(t, os.WriteFile(s.file+".go", nil, 0o600))
			assert.Equal(t, 6, p.end(), "nothing was lost in the meantime")
		})
	}
}

// TSTP stops the command and locker, CONT continues both.
func TestRunSuspend(t *testing.T) {
	w := onSQLite(t)
	s := newScript(t, `read x; exit 6`) // a shell that is stopped in the middle of a vfork stays there
	stdin, write, err := os.Pipe()
	require.NoError(t, err)
	defer write.Close()
	p := w.command(append([]string{"run", "r", "--"}, s.args...)...)
	p.Stdin = stdin
	p.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	p.launch()
	stdin.Close()
	group := s.group()
	require.NoError(t, p.Process.Signal(syscall.SIGTSTP))
	eventually(t, "both are stopped", func() bool { return state(group) == "T" && state(p.Process.Pid) == "T" })
	require.NoError(t, p.Process.Signal(syscall.SIGCONT))
	_, err = write.WriteString("go\n")
	require.NoError(t, err)
	assert.Equal(t, 6, p.end())
}

// state is a process's: R, S, T (stopped), Z …
func state(pid int) string {
	out, _ := exec.Command("ps", "-o", "stat=", "-p", strconv.Itoa(pid)).Output()
	return string(bytes.TrimSpace(out)[:min(1, len(bytes.TrimSpace(out)))])
}

// A holder that was killed with all of its group blocks nobody for longer than its TTL, and a waiter has the lock within a second
// after that.
func TestRunKilledHolderFreesTheLock(t *testing.T) {
	onEngines(t, func(t *testing.T, w *world) {
		const ttl = 3 * time.Second
		s := newScript(t, "sleep 100")
		p := w.start(append([]string{"run", "--ttl", ttl.String(), "r", "--"}, s.args...)...)
		group := s.group()
		waiter := newScript(t, `while [ ! -e "$0.go" ]; do sleep 0.05; done`)
		q := w.start(append([]string{"run", "--wait", "1m", "r", "--"}, waiter.args...)...)
		eventually(t, "the other waits", func() bool { return connected(q.Process.Pid) })

		require.NoError(t, p.Process.Kill())
		_ = syscall.Kill(-group, syscall.SIGKILL)
		<-p.exited
		killed := time.Now()
		dead := w.holder("r")
		require.NotZero(t, dead)
		assert.False(t, waiter.started())
		waiter.group()
		rec := w.holder("r")
		assert.NotEqual(t, dead.Owner, rec.Owner)
		assert.GreaterOrEqual(t, rec.AcquiredAt, dead.ExpiresAt)
		assert.LessOrEqual(t, rec.AcquiredAt.Sub(killed), ttl+time.Second)
		require.NoError(t, os.WriteFile(waiter.file+".go", nil, 0o600))
		assert.Equal(t, 0, q.end())
	})
}

// Of twenty processes that add one to a number in a file none is lost.
func TestRunCounter(t *testing.T) {
	onEngines(t, func(t *testing.T, w *world) {
		file := filepath.Join(t.TempDir(), "number")
		require.NoError(t, os.WriteFile(file, []byte("0\n"), 0o600))
		var all []*process
		for range 20 {
			all = append(all, w.start("run", "--wait", "60s", "counter", "--", "sh", "-c", `read n < "$0"; echo $((n + 1)) > "$0"`, file))
		}
		for _, p := range all {
			assert.Equal(t, 0, p.end(), p.stderr())
		}
		assert.Equal(t, "20\n", read(file))
	})
}

// Two containers have the same host name and the same pid, and still one lock has one holder.
func TestRunInTwoPIDNamespaces(t *testing.T) {
	unshare, err := exec.LookPath("unshare")
	if err != nil || exec.Command(unshare, "-pf", "true").Run() != nil {
		t.Skip("needs unshare and the right to use it")
	}
	w := onSQLite(t)
	run := func(args ...string) *process {
		p := w.command(append([]string{"-pf", "--kill-child", os.Args[0], "run", "--ttl", "5s", "r", "--"}, args...)...)
		p.Path, p.Args[0] = unshare, "unshare"
		return p.launch()
	}
	marker := filepath.Join(t.TempDir(), "marker")
	first := run("sh", "-c", `echo "$LOCKER_OWNER" > "$0"; while [ ! -e "$0.go" ]; do sleep 0.05; done`, marker)
	eventually(t, "the first runs", func() bool { return read(marker) != "" })
	assert.Contains(t, read(marker), ":1/")
	second := run("echo", "ran")
	assert.Equal(t, exitHeld, second.end())
	assert.Empty(t, second.stdout())
	require.NoError(t, os.WriteFile(marker+".go", nil, 0o600))
	assert.Equal(t, 0, first.end())
	third := run("sh", "-c", `echo "$LOCKER_OWNER"`)
	assert.Equal(t, 0, third.end())
	assert.NotEqual(t, read(marker), third.stdout())
}

// With no set-up at all there is a file, also when several start at once for the first time.
func TestRunNeedsNoSetUp(t *testing.T) {
	for _, variable := range []string{"HOME", "XDG_STATE_HOME"} {
		t.Run(variable, func(t *testing.T) {
			home := t.TempDir()
			w := &world{t: t, env: []string{"XDG_STATE_HOME=", variable + "=" + home}}
			var all []*process
			for range 8 {
				all = append(all, w.start("run", "--wait", "60s", "demo", "--", "echo", "hello"))
			}
			for _, p := range all {
				assert.Equal(t, 0, p.end())
				assert.Equal(t, "hello\n", p.stdout())
				assert.Empty(t, p.stderr())
			}
			found, err := filepath.Glob(home + "/locker/locker.db")
			if variable == "HOME" {
				require.NoError(t, filepath.WalkDir(home, func(path string, _ os.DirEntry, err error) error {
					if filepath.Base(path) == "locker.db" {
						found = append(found, path)
					}
					return err
				}))
			}
			require.NoError(t, err)
			require.Len(t, found, 1)
			info, err := os.Stat(filepath.Dir(found[0]))
			require.NoError(t, err)
			assert.Equal(t, os.FileMode(0o700), info.Mode().Perm())
		})
	}
}

// A job that ends early keeps its lock for the minimum hold, and no longer.
func TestRunMinHold(t *testing.T) {
	w := onSQLite(t)
	begin := time.Now()
	require.Equal(t, 0, w.run("run", "--min-hold", "3s", "r", "--", "true").code)
	rec := w.holder("r")
	require.NotZero(t, rec)
	assert.InDelta(t, 3, rec.ExpiresAt.Sub(rec.AcquiredAt).Seconds(), 1)
	assert.Equal(t, exitHeld, w.run("run", "r", "--", "true").code)
	assert.Equal(t, 0, w.run("run", "--wait", "1m", "r", "--", "true").code)
	assert.GreaterOrEqual(t, time.Since(begin), 2*time.Second)
}

// Nobody reads stderr, and the pipe is full: the command is stopped all the same.
func TestRunWithStderrBlocked(t *testing.T) {
	w := onSQLite(t)
	r, pipe, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close()
	defer pipe.Close()
	require.NoError(t, pipe.SetWriteDeadline(time.Now().Add(500*time.Millisecond)))
	for err == nil {
		_, err = pipe.Write(make([]byte, 4096))
	}
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	s := newScript(t, `trap "" TERM; exec 2> /dev/null; while :; do sleep 0.05; done`)
	p := w.command(append([]string{"run", "--ttl", "2s", "r", "--"}, s.args...)...)
	p.Stderr = pipe
	p.launch()
	group := s.group()
	_, err = w.table.ForceRelease(ctx(t), "r")
	require.NoError(t, err)
	eventually(t, "the group is gone", func() bool { return !alive(group) })
	assert.Equal(t, exitLost, p.end())
}

// A role that may only read gets an error at once, not a wait for ever.
func TestRunWithoutPrivilege(t *testing.T) {
	w := newWorld(t, testdb.Postgres(t))
	role := "reader_" + strconv.Itoa(os.Getpid())
	for _, q := range []string{"CREATE ROLE " + role + " LOGIN PASSWORD 'x'", "GRANT USAGE ON SCHEMA %s TO " + role, "GRANT SELECT ON distributed_locks TO " + role} {
		var schema string
		require.NoError(t, w.db.db.QueryRow("SELECT current_schema()").Scan(&schema))
		if strings.Contains(q, "%s") {
			q = fmt.Sprintf(q, schema)
		}
		_, err := w.db.db.Exec(q)
		require.NoError(t, err)
	}
	t.Cleanup(func() { _, _ = w.db.db.Exec("DROP OWNED BY " + role + "; DROP ROLE " + role) })
	begin := time.Now()
	r := w.run("--dsn", withUser(t, w.dsn, role, "x"), "run", "--wait", "10m", "r", "--", "echo", "ran")
	assert.Equal(t, exitUnavailable, r.code)
	assert.Less(t, time.Since(begin), soon)
	assert.Contains(t, r.err, "permission denied")
	assert.Empty(t, r.out)
}
