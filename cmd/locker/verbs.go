package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"os"
	"runtime/debug"
	"strings"
	"time"

	"github.com/locker-go/locker"
)

type acquireCmd struct {
	TTL      time.Duration `name:"ttl" default:"30s" placeholder:"DURATION" help:"How long the lock is held unless renewed (default ${default})."`
	Wait     time.Duration `default:"0s" placeholder:"DURATION" help:"How long to wait for a lock that is held, or a database that does not answer (default: not at all)."`
	Owner    string        `help:"In whose name. The same owner is granted again, so a name that two may use at once excludes neither. Default: one that nobody else has."`
	jsonFlag `embed:""`
	Resource string `arg:"" help:"What to lock."`
}

func (acquireCmd) Help() string {
	return `Prints the grant as variables for the shell:

  if grant=$(locker acquire nightly --ttl 10m); then
    eval "$grant"; work; locker release nightly
  fi

Not eval "$(locker acquire …)" && work: refused, it prints nothing, eval of nothing succeeds, and work runs without the lock.

renew and release find owner, token and TTL in LOCKER_OWNER, LOCKER_TOKEN and LOCKER_TTL if LOCKER_RESOURCE is the resource they are given. To hold several locks in one shell, keep their variables apart, or use --json, --owner and --token. Nothing renews the lock in between: "locker run" does.`
}

func (c *acquireCmd) Run(a *app) error {
	if c.Wait < 0 {
		return fail(exitUsage, "--wait is %v; it must not be negative", c.Wait)
	}
	return a.once(func(ctx context.Context, table *locker.Table) error {
		rec, err := c.acquire(ctx, table)
		if err != nil {
			return err
		}
		if c.JSON {
			return a.printJSON(asJSON(rec))
		}
		return a.printExports(rec, c.TTL)
	})
}

func (c *acquireCmd) acquire(ctx context.Context, table *locker.Table) (locker.Record, error) {
	owner := c.Owner
	if owner == "" {
		owner = uniqueOwner()
	}
	limit := c.Wait
	if limit == 0 {
		limit = patience
	}
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var held *locker.HeldError // the last time the database answered
	for poll := 5 * time.Millisecond; ; poll = min(2*poll, 200*time.Millisecond) {
		attempt, cancel := context.WithTimeout(limited, patience)
		rec, err := table.Acquire(attempt, c.Resource, owner, c.TTL)
		cancel()
		if err == nil && ctx.Err() == nil {
			return rec, nil
		}
		pause := poll/2 + mathrand.N(poll)
		switch {
		case errors.Is(err, locker.ErrInvalid), permanent(err):
			return locker.Record{}, err
		case errors.As(err, &held):
			pause = min(pause, held.Holder.Remaining+time.Millisecond)
		case c.Owner == "": // nobody knows whether that took it; under a name the user chose it may be a grant of long ago
			giveBack(table, c.Resource, owner)
		}
		if c.Wait == 0 {
			return locker.Record{}, cmp.Or(err, ctx.Err())
		}
		select {
		case <-time.After(pause):
		case <-limited.Done():
			if held != nil {
				err = held
			}
			return locker.Record{}, cmp.Or(err, ctx.Err())
		}
	}
}

// giveBack frees what an acquire may have taken although it ended with an error.
func giveBack(table *locker.Table, resource, owner string) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	if rec, err := table.Get(ctx, resource); err == nil && rec.Owner == owner {
		_ = table.Release(ctx, rec) // else its TTL does
	}
}

// permanent reports whether asking again is of no use: no table, no privilege.
func permanent(err error) bool {
	var p interface{ Permanent() bool }
	return errors.As(err, &p) && p.Permanent()
}

// uniqueOwner is readable and nobody else's: host and pid alone are the same in two containers.
func uniqueOwner() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	unique := make([]byte, 8)
	rand.Read(unique) // never fails
	return fmt.Sprintf("%.150s:%d/%s", strings.ToValidUTF8(host, "?"), os.Getpid(), hex.EncodeToString(unique))
}

// grantFlags name a grant.
type grantFlags struct {
	Owner string `help:"Who holds it (default: $$LOCKER_OWNER, where $$LOCKER_RESOURCE is RESOURCE)."`
	Token int64  `help:"Which grant, by its token (default: $$LOCKER_TOKEN likewise; with --owner alone any grant of that owner)."`
}

// record is the grant of resource that the flags, or the variables of acquire and run, name.
func (f grantFlags) record(resource string) (locker.Record, error) {
	rec := locker.Record{Resource: resource, Owner: f.Owner, Token: f.Token}
	if f.Token < 0 {
		return rec, fail(exitUsage, "--token is %d; a token is never negative", f.Token)
	}
	if rec.Owner != "" {
		return rec, nil
	}
	rec.Owner = os.Getenv("LOCKER_OWNER")
	if rec.Owner == "" || os.Getenv("LOCKER_RESOURCE") != resource {
		about := ""
		if other := os.Getenv("LOCKER_RESOURCE"); rec.Owner != "" && other != "" {
			about = fmt.Sprintf(" (LOCKER_RESOURCE is %q)", other)
		}
		return rec, fail(exitUsage, "%q: whose grant? Give --owner, and --token for exactly one%s", resource, about)
	}
	if token := os.Getenv("LOCKER_TOKEN"); rec.Token == 0 && token != "" {
		if _, err := fmt.Sscan(token, &rec.Token); err != nil || rec.Token <= 0 {
			return rec, fail(exitUsage, "LOCKER_TOKEN is not a token")
		}
	}
	return rec, nil
}

type renewCmd struct {
	TTL        *time.Duration `name:"ttl" placeholder:"DURATION" help:"How long it is held from now (default: $$LOCKER_TTL, where $$LOCKER_RESOURCE is RESOURCE, else 30s)."`
	grantFlags `embed:""`
	jsonFlag   `embed:""`
	Resource   string `arg:"" help:"What is locked."`
}

func (renewCmd) Help() string {
	return `Never takes a lock: if the lease is over, or another owner or grant has it, the exit code is 74.`
}

func (c *renewCmd) Run(a *app) error {
	rec, err := c.record(c.Resource)
	if err != nil {
		return err
	}
	ttl := locker.DefaultTTL
	if before := os.Getenv("LOCKER_TTL"); c.TTL != nil {
		ttl = *c.TTL
	} else if before != "" && os.Getenv("LOCKER_RESOURCE") == c.Resource {
		if ttl, err = time.ParseDuration(before); err != nil {
			return fail(exitUsage, "LOCKER_TTL is not a duration")
		}
	}
	return a.once(func(ctx context.Context, table *locker.Table) error {
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		rec, err := table.Renew(ctx, rec, ttl)
		if err != nil {
			return err
		}
		return a.printLock(rec, c.jsonFlag)
	})
}

type releaseCmd struct {
	Force      bool `help:"Free it whoever holds it, and print whom that evicts. The evicted learns of it at the next renewal and works on until then."`
	grantFlags `embed:""`
	jsonFlag   `embed:""`
	Resource   string `arg:"" help:"What is locked."`
}

func (releaseCmd) Help() string {
	return `If the lease is over already, or another owner or grant has it, nothing changes and the exit code is 74. With --force it is 1 if nobody holds it.`
}

func (c *releaseCmd) Run(a *app) error {
	if c.Force {
		if c.Owner != "" || c.Token != 0 {
			return fail(exitUsage, "--force frees the lock whoever holds it; leave out --owner and --token")
		}
		return a.once(func(ctx context.Context, table *locker.Table) error {
			ctx, cancel := context.WithTimeout(ctx, patience)
			defer cancel()
			rec, err := table.ForceRelease(ctx, c.Resource)
			if err != nil {
				return freeError(c.Resource, err)
			}
			return a.printLock(rec, c.jsonFlag)
		})
	}
	rec, err := c.record(c.Resource)
	if err != nil {
		return err
	}
	return a.once(func(ctx context.Context, table *locker.Table) error {
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		return table.Release(ctx, rec)
	})
}

type getCmd struct {
	jsonFlag `embed:""`
	Resource string `arg:"" help:"What is locked."`
}

func (getCmd) Help() string {
	return `The exit code is 1 if nobody holds it. Do not decide by it that a lock is free: acquire it.`
}

func (c *getCmd) Run(a *app) error {
	return a.once(func(ctx context.Context, table *locker.Table) error {
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		rec, err := table.Get(ctx, c.Resource)
		if err != nil {
			return freeError(c.Resource, err)
		}
		return a.printLock(rec, c.jsonFlag)
	})
}

func freeError(resource string, err error) error {
	if errors.Is(err, locker.ErrNotHeld) {
		return fail(exitFree, "%q: nobody holds it", resource)
	}
	return err
}

type lsCmd struct {
	jsonFlag `embed:""`
}

func (lsCmd) Help() string { return `By name. With --json one object a line.` }

func (c *lsCmd) Run(a *app) error {
	return a.once(func(ctx context.Context, table *locker.Table) error {
		const size = 1000
		after := ""
		for {
			request, cancel := context.WithTimeout(ctx, patience)
			page, err := table.List(request, after, size)
			cancel()
			if err != nil {
				return err
			}
			if err := a.printLocks(page, after == "", c.jsonFlag); err != nil || len(page) < size {
				return err
			}
			after = page[len(page)-1].Resource
		}
	})
}

type purgeCmd struct {
	Idle     time.Duration `default:"24h" placeholder:"DURATION" help:"Only rows that were last acquired longer ago than this (default ${default}). Hours, not seconds: an acquire that waits in the server must be over."`
	jsonFlag `embed:""`
}

func (purgeCmd) Help() string {
	return `A released lock keeps its row, which remembers the last token. Where names are used once, such rows pile up; this deletes them in small batches.`
}

func (c *purgeCmd) Run(a *app) error {
	return a.once(func(ctx context.Context, table *locker.Table) error {
		n, err := table.Purge(ctx, c.Idle)
		if err != nil {
			return err
		}
		if c.JSON {
			return a.printJSON(map[string]int64{"purged": n})
		}
		_, err = fmt.Fprintln(a.stdout, "purged", n)
		return err
	})
}

type initCmd struct {
	Print bool `help:"Print the DDL for the kind of database that the DSN names, for a migration. Nothing is connected to."`
}

func (initCmd) Help() string {
	return `Needed once on a server, by somebody who may create tables; a SQLite file gets its table by itself. A table that is there is only checked.`
}

func (c *initCmd) Run(a *app) error {
	if c.Print {
		table, err := a.describe()
		if err != nil {
			return err
		}
		_, err = fmt.Fprint(a.stdout, table.DDL())
		return err
	}
	return a.once(func(ctx context.Context, table *locker.Table) error {
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		return table.CreateTable(ctx)
	})
}

type versionCmd struct{}

// version is set by the linker in a release; else what the build knows of itself is printed.
var version string

func (versionCmd) Run(a *app) error {
	v, revision, goVersion := version, "", ""
	if info, ok := debug.ReadBuildInfo(); ok {
		goVersion = info.GoVersion
		if v == "" {
			v = info.Main.Version
		}
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				revision = " " + s.Value
			}
		}
	}
	_, err := fmt.Fprintf(a.stdout, "locker %s%s %s\n", v, revision, goVersion)
	return err
}
