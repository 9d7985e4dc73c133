// Command locker takes locks in a SQL database from the shell: it runs a command while holding one, or shows and changes them.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/alecthomas/kong"

	"github.com/locker-go/locker"
)

type grammar struct {
	DSN   string `name:"dsn" env:"LOCKER_DSN" placeholder:"DSN" help:"The database: sqlite:PATH, postgres://… or mysql://user:password@host:port/database. Default: a SQLite file in the state folder of the user. The variable is the better place for a password: other users can see a command line."`
	Table string `default:"distributed_locks" placeholder:"NAME" help:"The lock table, as NAME or SCHEMA.NAME (default ${default})."`

	Run     runCmd     `cmd:"" help:"Run a command while holding a lock."`
	Acquire acquireCmd `cmd:"" help:"Take a lock and leave it to its TTL."`
	Renew   renewCmd   `cmd:"" help:"Give a lock that is held a full TTL from now."`
	Release releaseCmd `cmd:"" help:"Free a lock."`
	Get     getCmd     `cmd:"" help:"Show who holds a lock."`
	Ls      lsCmd      `cmd:"" help:"List the locks that are held."`
	Purge   purgeCmd   `cmd:"" help:"Delete rows of locks that nobody uses any more."`
	Init    initCmd    `cmd:"" help:"Create the lock table, or print its DDL."`
	Version versionCmd `cmd:"" help:"Print the version."`
}

// Exit codes. The child's own pass through run unchanged.
const (
	exitFree          = 1  // get, release --force: nobody holds it
	exitUsage         = 64 // EX_USAGE
	exitUnavailable   = 69 // EX_UNAVAILABLE: the database gave no verdict
	exitLost          = 74 // the lease is lost, or was not held
	exitHeld          = 75 // EX_TEMPFAIL: another holds it
	exitNotExecutable = 126
	exitNotFound      = 127
)

const about = `Locks in a SQL database, from the shell.

With no set-up at all the locks are in a SQLite file of this user on this machine; LOCKER_DSN or --dsn names a database that others share.

Exit codes: 0 done; 1 nobody holds it (get, release --force); 64 usage; 69 the database could not be asked (unreachable, no table, no privilege); 74 the lease is lost or not held by this owner and token; 75 held by another; 128+n ended by signal n. Of run, besides these: the command's own, 126 not executable, 127 not found.`

func main() {
	os.Exit(execute(os.Args[1:], os.Stdout, os.Stderr))
}

// execute is main without the process.
func execute(args []string, stdout, stderr io.Writer) int {
	a := newApp(stdout, stderr)
	defer a.flush()
	var g grammar
	code := -1
	parser := kong.Must(&g,
		kong.Name("locker"), kong.Description(about), kong.Writers(stdout, stderr),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true}),
		kong.Exit(func(c int) { code = c }), // --help
		kong.KindMapper(reflect.String, verbatim),
	)
	parsed, err := parser.Parse(args)
	if code >= 0 {
		return code
	}
	if err != nil {
		a.say("%s; see locker --help", conceal(err.Error(), nil))
		return exitUsage
	}
	if dsn, set := os.LookupEnv("LOCKER_DSN"); set && dsn == "" && g.DSN == "" {
		// A variable that came out empty must not make every machine lock for itself.
		a.say("LOCKER_DSN is set but empty; unset it to lock in the file of this user, or name a database; see locker --help")
		return exitUsage
	}
	a.dsn, a.table = g.DSN, g.Table

	err = parsed.Run(a)
	a.close()
	if err == nil {
		return 0
	}
	var e *exitError
	if !errors.As(err, &e) {
		e = &exitError{code: exitCode(err), message: a.reason(err)}
		if e.code == exitUnavailable && a.database != nil && a.database.file != "" {
			e.message += " (lock file " + a.database.file + ")"
		}
	}
	if e.message != "" {
		a.say("%s", e.message)
	}
	if e.last != nil {
		a.flush()
		e.last()
	}
	return e.code
}

// verbatim takes a string as it is: kong's own way goes through JSON, which replaces bytes that are not UTF-8.
var verbatim = kong.MapperFunc(func(ctx *kong.DecodeContext, target reflect.Value) error {
	token, err := ctx.Scan.PopValue("string")
	if err != nil {
		return err
	}
	target.SetString(token.String())
	return nil
})

// exitCode is the code of an error of the library.
func exitCode(err error) int {
	switch {
	case errors.Is(err, locker.ErrInvalid):
		return exitUsage
	case errors.Is(err, locker.ErrHeld):
		return exitHeld
	case errors.Is(err, locker.ErrLost), errors.Is(err, locker.ErrNotHeld), errors.Is(err, locker.ErrNotOwner):
		return exitLost
	}
	return exitUnavailable
}

// exitError ends the command with a code, and a message unless that is "".
type exitError struct {
	code    int
	message string
	last    func() // done last, if not nil
}

func (e *exitError) Error() string { return e.message }

func fail(code int, format string, args ...any) error {
	return &exitError{code: code, message: fmt.Sprintf(format, args...)}
}

// interrupted is the end by a signal, as a shell tells it.
func interrupted(sig syscall.Signal) error { return &exitError{code: 128 + int(sig)} }

// app is what the commands share.
type app struct {
	stdout, stderr io.Writer
	dsn, table     string
	database       *database // once opened

	quiet    atomic.Bool // the outcome is settled: what the session warns of while it cleans up is of no interest
	messages chan string
	flushed  chan struct{}
	done     sync.Once
}

func newApp(stdout, stderr io.Writer) *app {
	a := &app{stdout: stdout, stderr: stderr, messages: make(chan string, 100), flushed: make(chan struct{})}
	go func() {
		defer close(a.flushed)
		for m := range a.messages {
			if m == "" {
				return
			}
			fmt.Fprintf(a.stderr, "locker: %s\n", m)
		}
	}()
	return a
}

// say prints a message, in the background: a reader of stderr who has fallen asleep must not keep run from stopping its command. What
// others wrote goes through reason first.
func (a *app) say(format string, args ...any) {
	select {
	case a.messages <- fmt.Sprintf(format, args...):
	default: // nobody reads
	}
}

// flush waits for what has been said, and ends the saying.
func (a *app) flush() {
	a.done.Do(func() {
		a.say("")
		select {
		case <-a.flushed:
		case <-time.After(time.Second):
		}
	})
}

// reason is the text of an error of the library or of a driver, without any password.
func (a *app) reason(err error) string {
	var secrets []string
	if a.database != nil {
		secrets = a.database.secrets
	}
	return conceal(strings.TrimPrefix(err.Error(), "locker: "), secrets)
}

// open returns the lock table of the database that the DSN names. In SQLite it is created if need be: a file of one's own asks for
// no set-up. On a server that is the business of init, by somebody who may.
func (a *app) open(ctx context.Context) (*locker.Table, error) {
	table, err := a.describe()
	if err != nil {
		return nil, err
	}
	if a.database.file == "" {
		return table, nil
	}
	if err := a.database.makeFolder(); err != nil {
		return nil, fail(exitUnavailable, "no place for the lock file: %v; name another with --dsn or LOCKER_DSN", err)
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := table.CreateTable(ctx); err != nil {
		return nil, err
	}
	return table, nil
}

// describe is open without any connection.
func (a *app) describe() (*locker.Table, error) {
	var err error
	if a.database, err = parseDSN(a.dsn); err != nil {
		return nil, err
	}
	return locker.New(a.database.db, a.database.dialect, locker.WithTable(a.table))
}

func (a *app) close() {
	if a.database != nil {
		a.database.db.Close()
	}
}

// patience is how long one request may take: long enough for a server that is starting, too short to think the command hangs.
const patience = 10 * time.Second

// ending are the signals that end what locker does by itself.
var ending = []os.Signal{os.Interrupt, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT}

// interruptible runs f with a context that ends when one of the ending signals arrives, and then returns that signal. It returns
// when f does.
func interruptible(signals <-chan os.Signal, f func(context.Context) error) (os.Signal, error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	var first os.Signal
	for {
		select {
		case err := <-done:
			return first, err
		case sig := <-signals:
			if !slices.Contains(ending, sig) {
				continue
			}
			if first != nil { // asked twice: do not even clean up
				return first, context.Canceled
			}
			first = sig
			cancel()
		}
	}
}

// once runs f, one step of a command that is over soon, with a context that ends with the first ending signal.
func (a *app) once(f func(context.Context, *locker.Table) error) error {
	signals := listen(ending)
	defer signal.Stop(signals)
	sig, err := interruptible(signals, func(ctx context.Context) error {
		table, err := a.open(ctx)
		if err != nil {
			return err
		}
		return f(ctx, table)
	})
	if sig != nil && err != nil {
		return interrupted(sig.(syscall.Signal))
	}
	return err
}

// listen asks for those signals that are not ignored: under nohup, or in the background of a script, they stay ignored.
func listen(signals []os.Signal) chan os.Signal {
	c := make(chan os.Signal, 16)
	for _, s := range signals {
		if !signal.Ignored(s) {
			signal.Notify(c, s)
		}
	}
	return c
}
