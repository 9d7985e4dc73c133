package main

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// terminal is a pseudo-terminal with a session on it.
type terminal struct {
	*os.File
	process *process

	mu     sync.Mutex
	screen strings.Builder
}

// newTerminal starts a program in a session of its own on a new terminal.
func newTerminal(w *world, name string, args ...string) *terminal {
	t := w.t
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Skip("no pseudo-terminals: ", err)
	}
	require.NoError(t, unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	require.NoError(t, err)
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	require.NoError(t, err)
	defer slave.Close()

	path, err := exec.LookPath(name)
	if err != nil {
		t.Skip(err)
	}
	p := w.command(args...)
	p.Path, p.Args[0] = path, name
	p.Stdin, p.Stdout, p.Stderr = slave, slave, slave
	p.Env = append(p.Env, "PS1=", "HISTFILE=", "LOCKER="+os.Args[0])
	p.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	tty := &terminal{File: master, process: p.launch()}
	read := make(chan struct{})
	go func() {
		defer close(read)
		buf := make([]byte, 4096)
		for {
			n, err := master.Read(buf)
			if err != nil {
				return
			}
			tty.mu.Lock()
			tty.screen.Write(buf[:n])
			tty.mu.Unlock()
		}
	}()
	t.Cleanup(func() {
		master.Close() // hangs up
		if t.Failed() {
			t.Logf("screen: %s", tty.text())
		}
	})
	return tty
}

func (tty *terminal) text() string {
	tty.mu.Lock()
	defer tty.mu.Unlock()
	return strings.ReplaceAll(tty.screen.String(), "\r\n", "\n")
}

func (tty *terminal) shows(s string) bool { return strings.Contains(tty.text(), s) }

func (tty *terminal) enter(s string) {
	_, err := tty.WriteString(s)
	require.NoError(tty.process.t, err)
}

const ctrlC, ctrlZ = "\x03", "\x1a"

// The command can read from the terminal as if locker were not there, and afterwards whoever started it can.
func TestRunHandsTheTerminalOver(t *testing.T) {
	w := onSQLite(t)
	tty := newTerminal(w, "sh", "-c", `"$LOCKER" run r -- sh -c 'read x; echo "got:$x"; exit 5'; echo "code:$?"; read y; echo "then:$y"`)
	tty.enter("one\n")
	eventually(t, "the command reads", func() bool { return tty.shows("got:one\n") })
	tty.enter("two\n")
	eventually(t, "the shell reads", func() bool { return tty.shows("code:5\ntwo\nthen:two\n") || tty.shows("two\ncode:5\nthen:two\n") })
	assert.Equal(t, 0, tty.process.end())
}

// Ctrl-C ends the command, and then does to those who share locker's group what it would have done without locker.
func TestRunCtrlC(t *testing.T) {
	w := onSQLite(t)
	s := newScript(t, "exec sleep 100")
	tty := newTerminal(w, "sh", append([]string{"-c", `trap 'echo "interrupted"' INT; "$LOCKER" run r -- "$@"; echo "code:$?"`, "sh"}, s.args...)...)
	group := s.group()
	tty.enter(ctrlC)
	eventually(t, "the script goes on", func() bool { return tty.shows("interrupted\n") && tty.shows("code:130\n") })
	assert.False(t, alive(group))
	assert.Zero(t, w.holder("r"))
}

// Ctrl-Z suspends the whole job, and fg continues it, as without locker; also if a script has started it.
func TestRunJobControl(t *testing.T) {
	for name, start := range map[string]string{
		"direct": `"$LOCKER" run r -- "$@"`, "in a script": `sh -c '"$LOCKER" run r -- "$@"; exit $?' sh "$@"`, "in a pipeline": `"$LOCKER" run r -- "$@" | cat`,
	} {
		t.Run(name, func(t *testing.T) {
			w := onSQLite(t)
			s := newScript(t, `read x; echo "got:$x"; exit 5`) // a shell that is stopped in the middle of a vfork stays there
			tty := newTerminal(w, "bash", append([]string{"--norc", "--noprofile", "-i", "-s", "--"}, s.args...)...)
			tty.enter("set -o pipefail\n" + start + "\n")
			group := s.group()
			tty.enter(ctrlZ)
			eventually(t, "the job is stopped", func() bool { return tty.shows("Stopped") && state(group) == "T" })
			tty.enter("echo shell:$((40 + 2))\n")
			eventually(t, "the shell has the terminal", func() bool { return tty.shows("shell:42") })
			tty.enter("fg\n")
			eventually(t, "the command goes on", func() bool { return state(group) != "T" })
			tty.enter("one\n")
			eventually(t, "the command reads", func() bool { return tty.shows("got:one\n") })
			tty.enter("echo code:$?; exit\n")
			eventually(t, "the code", func() bool { return tty.shows("code:5\n") })
			tty.process.end()
			assert.Zero(t, w.holder("r"))
		})
	}
}

// In the background the command does not get the terminal; if it asks for it the job is stopped, as without locker.
func TestRunInTheBackground(t *testing.T) {
	w := onSQLite(t)
	s := newScript(t, `read x; echo "got:$x"; exit 5`)
	tty := newTerminal(w, "bash", append([]string{"--norc", "--noprofile", "-i", "-s", "--"}, s.args...)...)
	tty.enter(`"$LOCKER" run r -- "$@" &` + "\n")
	group := s.group()
	eventually(t, "the command is stopped", func() bool { return state(group) == "T" })
	tty.enter("jobs; echo shell:$((40 + 2))\n")
	eventually(t, "the shell has the terminal", func() bool { return tty.shows("shell:42") })
	tty.enter("fg\n")
	eventually(t, "the command goes on", func() bool { return state(group) != "T" })
	tty.enter("one\n")
	eventually(t, "the command reads", func() bool { return tty.shows("got:one\n") })
	tty.enter("echo code:$?; exit\n")
	eventually(t, "the code", func() bool { return tty.shows("code:5\n") })
	tty.process.end()
}

// If locker is killed with KILL, nobody renews any more: the command is told.
func TestRunDiesWithLocker(t *testing.T) {
	w := onSQLite(t)
	s := newScript(t, `trap 'echo TERM > "$0.term"; exit' TERM; touch "$0.ready"; while :; do sleep 0.05; done`)
	p := w.start(append([]string{"run", "r", "--"}, s.args...)...)
	eventually(t, "the trap is set", func() bool { _, err := os.Stat(s.file + ".ready"); return err == nil })
	require.NoError(t, p.Process.Kill())
	eventually(t, "TERM", func() bool { return read(s.file+".term") != "" })
}
