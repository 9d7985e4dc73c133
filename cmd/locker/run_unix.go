//go:build unix

package main

import (
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// alsoPassed are the signals that are passed on to the command and that do nothing while there is none. SIGTSTP joins them with the
// command: a locker that waits is stopped by it as any program is.
var alsoPassed = []os.Signal{unix.SIGUSR1, unix.SIGUSR2, unix.SIGWINCH, unix.SIGCONT}

// group is a command in a process group of its own.
type group struct {
	exited  <-chan int            // the exit code, once
	stopped <-chan syscall.Signal // what the command was stopped by, each time

	signals  chan<- os.Signal
	id       int                // of the process group: the command's pid
	own      int                // locker's group
	terminal bool               // stdin is the terminal
	handed   bool               // the command has had its foreground
	status   syscall.WaitStatus // once exited
}

func startGroup(cmd *exec.Cmd, signals chan<- os.Signal) (*group, error) {
	cmd.SysProcAttr = dieWithParent()
	cmd.SysProcAttr.Setpgid = true
	if !signal.Ignored(unix.SIGTSTP) {
		signal.Notify(signals, unix.SIGTSTP) // from here on it would stop locker alone
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	exited, stopped := make(chan int, 1), make(chan syscall.Signal, 1)
	g := &group{exited: exited, stopped: stopped, signals: signals, id: cmd.Process.Pid, own: unix.Getpgrp()}
	_ = cmd.Process.Release() // waited for below: os.Process does not tell when it is stopped

	// A group that hands the terminal over from the background is stopped by SIGTTOU. Not before the start, or the command would
	// ignore it too.
	signal.Ignore(unix.SIGTTOU)
	g.terminal = g.foreground() != 0
	g.giveTerminal()

	go func() {
		for {
			var status syscall.WaitStatus
			switch _, err := syscall.Wait4(g.id, &status, syscall.WUNTRACED, nil); {
			case err == syscall.EINTR:
			case err == nil && status.Stopped():
				stopped <- status.StopSignal()
			default:
				g.status = status
				exited <- exitStatus(status)
				return
			}
		}
	}()
	return g, nil
}

func exitStatus(status syscall.WaitStatus) int {
	if status.Signaled() {
		return 128 + int(status.Signal())
	}
	return status.ExitStatus()
}

func (g *group) send(sig syscall.Signal) { _ = unix.Kill(-g.id, sig) } // an error says that it is gone

func (g *group) terminate() {
	g.send(unix.SIGTERM)
	g.send(unix.SIGCONT) // one that is stopped would not hear it
}

func (g *group) kill() { g.send(unix.SIGKILL) }

// gone reports whether the group is empty. Its first process must have exited.
func (g *group) gone() bool {
	for { // as the first process of a container locker inherits the orphans
		if pid, err := syscall.Wait4(-g.id, nil, syscall.WNOHANG, nil); pid <= 0 && err != syscall.EINTR {
			break
		}
	}
	return unix.Kill(-g.id, 0) != nil
}

// pass passes sig on. trusted says whether the command may go on after a stop.
func (g *group) pass(sig os.Signal, trusted func() bool) {
	switch sig {
	case unix.SIGTSTP:
		g.send(unix.SIGTSTP)
		g.suspend()
		fallthrough
	case unix.SIGCONT:
		if trusted() {
			g.resume()
		}
	default:
		g.send(sig.(syscall.Signal))
	}
}

// wasStopped is told that sig stopped the command, and reports whether it is to go on, after a while in which the whole job was
// stopped if need be: the shell sees locker only, and would leave the terminal to a command that is stopped.
func (g *group) wasStopped(sig syscall.Signal) bool {
	if !g.terminal {
		return false // somebody's wish; the lease is renewed
	}
	wants := sig == unix.SIGTTIN || sig == unix.SIGTTOU
	switch foreground := g.foreground(); {
	case foreground == g.own, foreground == g.id && wants:
		return true // it asked for the terminal a moment before it was handed over
	case foreground == g.id:
		g.takeTerminal() // Ctrl-Z
	case !wants:
		return false
	}
	// Locker's own group may hold the script that started it, or others of a pipeline.
	signal.Ignore(unix.SIGTSTP) // but locker itself, to which it would be one to pass on
	_ = unix.Kill(0, unix.SIGTSTP)
	g.suspend()
	signal.Notify(g.signals, unix.SIGTSTP)
	return true
}

// suspend stops locker until SIGCONT. The Go runtime does not restore the effect of SIGTSTP after Notify. That of SIGTTIN is the same,
// and the kernel leaves it out as well where there is no shell to continue the job.
func (g *group) suspend() {
	_ = unix.Kill(unix.Getpid(), unix.SIGTTIN)
	time.Sleep(100 * time.Millisecond) // until it has arrived
}

// resume continues the command after a stop.
func (g *group) resume() {
	g.giveTerminal()
	g.send(unix.SIGCONT)
}

// foreground is the group that has the foreground of the terminal, 0 if stdin is not the terminal of this session.
func (g *group) foreground() int {
	id, err := unix.IoctlGetInt(0, unix.TIOCGPGRP)
	if err != nil {
		return 0
	}
	return id
}

// giveTerminal hands the foreground to the command if it is locker's to give.
func (g *group) giveTerminal() {
	if g.terminal && g.foreground() == g.own && unix.IoctlSetPointerInt(0, unix.TIOCSPGRP, g.id) == nil {
		g.handed = true
	}
}

func (g *group) takeTerminal() { _ = unix.IoctlSetPointerInt(0, unix.TIOCSPGRP, g.own) }

// leave takes the foreground back at the end, unless a shell has given it to somebody else in the meantime.
func (g *group) leave() {
	if !g.handed {
		return
	}
	if id := g.foreground(); id == g.id || id != 0 && unix.Kill(-id, 0) == unix.ESRCH {
		g.takeTerminal()
	}
}

// last does what remains to be done when all else is. A Ctrl-C that ended the command did not reach locker's own group, which may be a script
// that should end too.
func (g *group) last() {
	if g.handed && g.status.Signaled() && g.status.Signal() == unix.SIGINT {
		signal.Reset(unix.SIGINT)
		_ = unix.Kill(0, unix.SIGINT)
		time.Sleep(100 * time.Millisecond) // until it has arrived
	}
}
