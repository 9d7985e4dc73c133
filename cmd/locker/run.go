package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/locker-go/locker"
)

type runCmd struct {
	TTL      time.Duration `name:"ttl" default:"30s" placeholder:"DURATION" help:"How long a dead holder blocks others (default ${default}). It is renewed at a third of it."`
	Wait     time.Duration `default:"0s" placeholder:"DURATION" help:"How long to wait for a lock that is held, or a database that does not answer (default: not at all)."`
	MinHold  time.Duration `default:"0s" placeholder:"DURATION" help:"Keep the lock at least this long, however soon the command ends, so that a job that several machines start at the same time runs once."`
	HeldCode uint8         `name:"conflict-exit-code" short:"E" default:"75" placeholder:"CODE" help:"Exit code if another holds the lock (default ${default}); 0 makes that a silent skip."`
	Resource string        `arg:"" help:"What to lock."`
	Command  []string      `arg:"" passthrough:"" help:"The command and its arguments, passed on as they are; no shell. Write -- before it."`
}

func (runCmd) Help() string {
	return `Such as: locker run nightly --wait 5m -- pg_dump -f backup.sql shop

The exit code is the command's own (128+n if signal n ended it), or 75 (see -E) if the lock is held, 74 if the lease was lost, whatever the command's was, 69 if the database could not be asked, 64 for usage, 126 and 127 if the command cannot be run or is not there. The command finds LOCKER_RESOURCE, LOCKER_OWNER and LOCKER_TOKEN in its environment; the token rises with every grant, so a downstream can refuse a lower one.

If the lease cannot be renewed, the command and all of its process group get TERM a tenth of the TTL (at most 10 s) before the lease can no longer be trusted, and KILL then, which is before the lease ends in the database. If the lease is known to be lost (another has it, or release --force), TERM comes at once and KILL that tenth later. Nothing revives the command after TERM. This holds while locker runs: not if it is itself killed with KILL or stopped, not on a suspended machine, and not for children that leave the process group. When it goes on after such a stop it looks at the clock first. After kill -9 the lock frees itself with its TTL; on Linux the command (not its children) then gets TERM.

TERM, INT, HUP, QUIT, USR1, USR2, WINCH, TSTP and CONT are passed on to the process group; locker waits for the command, frees the lock and ends as the command did. While it waits for the lock, TERM, INT, HUP and QUIT end it and nothing is run. If stdin is the terminal and locker is in its foreground, the command gets the foreground; suspended with Ctrl-Z it is not renewed. Stdin, stdout and stderr are the command's own. When the command itself has ended, what it left in the background goes on without the lock, as under a shell.

On Windows TERM is a Ctrl-Break event, which some programs do not know; KILL ends the job object with all processes in it; signals are Ctrl-C and Ctrl-Break only.`
}

func (c *runCmd) Run(a *app) error {
	if len(c.Command) > 0 && c.Command[0] == "--" {
		c.Command = c.Command[1:]
	}
	switch {
	case len(c.Command) == 0:
		return fail(exitUsage, "no command; write locker run RESOURCE -- COMMAND")
	case c.Wait < 0:
		return fail(exitUsage, "--wait is %v; it must not be negative", c.Wait)
	}
	path, err := findCommand(c.Command[0])
	if err != nil {
		return err
	}

	signals := listen(append(ending, alsoPassed...))
	defer signal.Stop(signals)
	var l *held
	sig, err := interruptible(signals, func(ctx context.Context) (err error) {
		l, err = c.lock(ctx, a)
		return err
	})
	switch {
	case sig != nil: // and if the lock was granted just then, nothing has run under it
		l.abandon()
		return interrupted(sig.(syscall.Signal))
	case errors.Is(err, locker.ErrHeld):
		l.end()
		hint := "--wait DURATION waits for it"
		if c.Wait > 0 {
			hint = fmt.Sprintf("waited %v", c.Wait)
		}
		var by *locker.HeldError
		if errors.As(err, &by) {
			err = by
		}
		if c.HeldCode == 0 { // that is a skip, not a failure, and cron would mail what is said
			return nil
		}
		return fail(int(c.HeldCode), "%s; %s", a.reason(err), hint)
	case err != nil:
		l.end()
		return err
	}
	return c.supervise(a, path, l, signals)
}

// held is the session of one lease.
type held struct {
	app     *app
	table   *locker.Table
	session *locker.Session
	lease   *locker.Lease
}

// lock takes the lock, waiting if asked to.
func (c *runCmd) lock(ctx context.Context, a *app) (*held, error) {
	table, err := a.open(ctx)
	if err != nil {
		return nil, err
	}
	session, err := locker.NewSession(table, locker.WithTTL(c.TTL), locker.WithMinHold(c.MinHold), locker.WithLogger(slog.New(warnings{a})))
	if err != nil {
		return nil, err
	}
	l := &held{app: a, table: table, session: session}
	if c.Wait > 0 {
		l.lease, err = session.Lock(ctx, c.Resource, locker.WithMaxWait(c.Wait))
		return l, err
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	l.lease, err = session.TryLock(ctx, c.Resource)
	return l, err
}

// end ends the session: it frees the lock if it is held still, and gives back what an acquire may have taken although it ended with an
// error.
func (l *held) end() {
	if l == nil {
		return
	}
	l.app.quiet.Store(true)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	_ = l.session.Close(ctx) // what is left ends with its TTL
}

// abandon is end for a lock under which nothing has run: a minimum hold is not for that.
func (l *held) abandon() {
	if l != nil && l.lease != nil {
		l.app.quiet.Store(true)
		giveBack(l.table, l.lease.Record().Resource, l.lease.Record().Owner)
	}
	l.end()
}

// supervise runs the command under the lease and stops it in time if the lease is lost.
func (c *runCmd) supervise(a *app, path string, l *held, signals chan os.Signal) error {
	rec := l.lease.Record()
	cmd := &exec.Cmd{
		Path: path, Args: c.Command,
		// Files, never pipes that somebody would have to copy: what the command leaves behind may keep them open.
		Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr,
		Env: append(os.Environ(),
			"LOCKER_RESOURCE="+rec.Resource, "LOCKER_OWNER="+rec.Owner, fmt.Sprintf("LOCKER_TOKEN=%d", rec.Token), fmt.Sprintf("LOCKER_TTL=%v", c.TTL)),
	}
	runtime.LockOSThread() // for dieWithParent
	group, err := startGroup(cmd, signals)
	if err != nil {
		l.abandon()
		return fail(exitNotExecutable, "%s cannot be run: %v", c.Command[0], reasonOf(err)) // it was there a moment ago
	}

	w := &watch{app: a, lease: l.lease, group: group, grace: min(c.TTL/10, 10*time.Second)}
	code := w.wait(signals)
	group.leave()
	if w.stopping() {
		if group.gone() {
			l.end() // the row may be this grant's still
		}
		return &exitError{code: exitLost}
	}
	_, err = interruptible(signals, func(context.Context) error { return l.lease.Release(context.Background()) })
	switch {
	case errors.Is(err, locker.ErrLost):
		a.say("%s", a.reason(err))
		return &exitError{code: exitLost}
	case err != nil:
		a.say("%q could not be released, it frees itself within %v: %s", rec.Resource, c.TTL, a.reason(err))
	}
	l.end()
	return &exitError{code: code, last: group.last}
}

// watch waits for a command and stops it when its lease can no longer be trusted.
type watch struct {
	app   *app
	lease *locker.Lease
	group *group
	grace time.Duration // from TERM to KILL

	killAt time.Time // set at TERM and never changed: nothing revives the command
	killed bool
	timer  *time.Timer
}

// wait returns the exit code of the command once it has ended, with all of its group if it had to be stopped.
func (w *watch) wait(signals <-chan os.Signal) int {
	lost, cancel := w.lease.Context(context.Background())
	defer cancel()
	ended := lost.Done()
	w.timer = time.NewTimer(0)
	defer w.timer.Stop()
	// The wall clock goes on while a machine is suspended, timers do not: look again every second.
	tick := time.NewTicker(time.Second)
	defer tick.Stop()

	for {
		select {
		case code := <-w.group.exited:
			w.look()
			if w.stopping() {
				w.stopRest(signals)
			}
			return code
		case sig := <-signals:
			w.group.pass(sig, w.trusted)
		case sig := <-w.group.stopped:
			if w.group.wasStopped(sig) && w.trusted() {
				w.group.resume()
			}
		case <-ended:
			ended = nil
			w.look()
		case <-w.timer.C:
			w.look()
		case <-tick.C:
			w.look()
		}
	}
}

func (w *watch) stopping() bool { return !w.killAt.IsZero() }

// trusted looks and reports whether the command may go on.
func (w *watch) trusted() bool {
	w.look()
	return !w.stopping()
}

// look does what is due: TERM, KILL, or nothing yet.
func (w *watch) look() {
	until, lost := w.lease.TrustedUntil(), w.lease.Err()
	if !w.stopping() && (lost != nil || past(until.Add(-w.grace))) {
		w.killAt = until
		if latest := time.Now().Add(w.grace); latest.Before(until) {
			w.killAt = latest
		}
		if !past(w.killAt) {
			w.group.terminate()
		}
		what := "could not be renewed in time"
		if lost != nil {
			what = "is lost"
		}
		w.app.say("stopping the command: the lease on %q %s", w.lease.Record().Resource, what) // the session says why
	}
	switch {
	case !w.stopping():
		w.timer.Reset(time.Until(until.Add(-w.grace)))
	case past(w.killAt):
		w.group.kill()
		w.killed = true
		w.timer.Reset(100 * time.Millisecond) // once more, for one that was being born
	default:
		w.timer.Reset(time.Until(w.killAt))
	}
}

// stopRest waits for the rest of a group whose first process has ended, and kills it when its time is up.
func (w *watch) stopRest(signals <-chan os.Signal) {
	const zombies = time.Second // nobody may be there to reap them
	for poll := time.Millisecond; !w.group.gone(); poll = min(2*poll, 20*time.Millisecond) {
		if w.look(); w.killed && past(w.killAt.Add(zombies)) {
			return
		}
		select {
		case sig := <-signals:
			w.group.pass(sig, w.trusted)
		case <-time.After(poll):
		}
	}
}

// past reports whether t has come, by the monotonic clock or by the wall clock.
func past(t time.Time) bool {
	now := time.Now()
	return !now.Before(t) || !now.Round(0).Before(t.Round(0))
}

// findCommand looks name up as a shell does, before anything is locked.
func findCommand(name string) (string, error) {
	path, err := exec.LookPath(name)
	switch {
	case err == nil, errors.Is(err, exec.ErrDot): // "." in PATH is the user's own choice
		return path, nil
	case errors.Is(err, exec.ErrNotFound) && inPath(name):
		return "", fail(exitNotExecutable, "%s: %v", name, fs.ErrPermission)
	case errors.Is(err, exec.ErrNotFound), errors.Is(err, fs.ErrNotExist):
		return "", fail(exitNotFound, "%s: command not found", name)
	}
	return "", fail(exitNotExecutable, "%s: %v", name, reasonOf(err))
}

// inPath reports whether there is a file of that name in PATH, which then is not executable.
func inPath(name string) bool {
	if runtime.GOOS == "windows" || name == "" || strings.ContainsRune(name, filepath.Separator) {
		return false
	}
	for _, dir := range filepath.SplitList(os.Getenv("PATH")) {
		if info, err := os.Stat(filepath.Join(dir, name)); err == nil && info.Mode().IsRegular() {
			return true
		}
	}
	return false
}

// reasonOf is err without the system call and the path.
func reasonOf(err error) error {
	var command *exec.Error
	var file *fs.PathError
	switch {
	case errors.As(err, &command):
		return command.Err
	case errors.As(err, &file):
		return file.Err
	}
	return err
}

// warnings prints what a session warns of, such as a renewal that failed and is tried again.
type warnings struct{ a *app }

func (warnings) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelWarn }

func (w warnings) Handle(_ context.Context, r slog.Record) error {
	if w.a.quiet.Load() {
		return nil
	}
	text := r.Message
	r.Attrs(func(at slog.Attr) bool {
		if at.Key == "error" {
			text += ": " + strings.TrimPrefix(at.Value.String(), "locker: ")
		}
		return true
	})
	w.a.say("%s", w.a.reason(errors.New(text)))
	return nil
}

func (w warnings) WithAttrs([]slog.Attr) slog.Handler { return w }
func (w warnings) WithGroup(string) slog.Handler      { return w }
