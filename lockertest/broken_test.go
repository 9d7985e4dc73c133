package lockertest

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/locker-go/locker"
)

// brokenLockers are wrong, each in one way that has been seen in some lock library or is easily made, and fail the cases that are
// there to find it.
var brokenLockers = []struct {
	name   string
	locker func() locker.Locker
	fails  []string
}{
	{"grants without keeping it", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, acquire: func(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
			return NewMemory().Acquire(ctx, resource, owner, ttl)
		}}
	}, []string{"acquire-free", "acquire-held", "get", "errors"}},

	{"acquire steals", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, acquire: func(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
			if _, err := m.ForceRelease(ctx, resource); err != nil && !errors.Is(err, locker.ErrNotHeld) {
				return locker.Record{}, err
			}
			return m.Acquire(ctx, resource, owner, ttl)
		}}
	}, []string{"acquire-held", "acquire-expired", "ttl-lasts", "names-owner", "one-winner", "one-winner-expired", "two-lockers"}},

	{"a refusal extends the lease", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, acquire: func(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
			rec, err := m.Acquire(ctx, resource, owner, ttl)
			if errors.Is(err, locker.ErrHeld) {
				m.change(resource, func(r *memoryRow) { r.expires = time.Now().Add(ttl).UnixMicro() })
			}
			return rec, err
		}}
	}, []string{"acquire-held", "ttl-lasts"}},

	{"a refusal takes the token", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, acquire: func(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
			rec, err := m.Acquire(ctx, resource, owner, ttl)
			if errors.Is(err, locker.ErrHeld) {
				m.change(resource, func(r *memoryRow) { r.token++ })
			}
			return rec, err
		}}
	}, []string{"acquire-held", "acquire-expired"}},

	{"a refusal that is not a *HeldError", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, acquire: func(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
			rec, err := m.Acquire(ctx, resource, owner, ttl)
			if errors.Is(err, locker.ErrHeld) {
				err = fmt.Errorf("%q: %w", resource, locker.ErrHeld)
			}
			return rec, err
		}}
	}, []string{"acquire-held", "one-winner", "errors"}},

	{"select, then write", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, acquire: func(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
			if holder, err := m.Get(ctx, resource); err == nil && holder.Owner != owner {
				return locker.Record{}, &locker.HeldError{Holder: holder}
			}
			time.Sleep(time.Millisecond)
			m.change(resource, func(r *memoryRow) { r.owner = owner })
			return m.Acquire(ctx, resource, owner, ttl)
		}}
	}, []string{"one-winner-expired", "counter", "no-overlap"}},

	{"insert, and update what is there", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, acquire: func(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
			if holder, err := m.Get(ctx, resource); err == nil && holder.Owner != owner {
				return locker.Record{}, &locker.HeldError{Holder: holder}
			}
			time.Sleep(time.Millisecond)
			rec, err := m.Acquire(ctx, resource, owner, ttl)
			if errors.Is(err, locker.ErrHeld) {
				m.change(resource, func(r *memoryRow) { r.owner, r.token = owner, r.token+1 })
				return m.Get(ctx, resource)
			}
			return rec, err
		}}
	}, []string{"one-winner", "one-winner-expired", "counter"}},

	{"the same owner's acquire is a renewal", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, acquire: func(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
			if rec, err := m.Renew(ctx, locker.Record{Resource: resource, Owner: owner}, ttl); err == nil {
				return rec, nil
			}
			return m.Acquire(ctx, resource, owner, ttl)
		}}
	}, []string{"acquire-again", "tokens-rise"}},

	{"the same owner is refused", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, acquire: func(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
			if rec, err := m.Get(ctx, resource); err == nil {
				return locker.Record{}, &locker.HeldError{Holder: rec}
			}
			return m.Acquire(ctx, resource, owner, ttl)
		}}
	}, []string{"acquire-again"}},

	{"leases do not end", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, acquire: func(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
			rec, err := m.Acquire(ctx, resource, owner, ttl)
			if err == nil {
				m.change(resource, func(r *memoryRow) { r.expires += time.Hour.Microseconds() })
			}
			return rec, err
		}}
	}, []string{"acquire-free", "acquire-expired", "renew-not-held", "release-not-held", "ttl-lasts"}},

	{"leases end early", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, acquire: func(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
			rec, err := m.Acquire(ctx, resource, owner, ttl)
			if err == nil {
				m.change(resource, func(r *memoryRow) { r.expires -= ttl.Microseconds() / 2 })
			}
			return rec, err
		}}
	}, []string{"ttl-lasts", "acquire-free"}},

	{"the expired owner comes first", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, acquire: func(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
			if r := m.row(resource); r.owner != "" && r.owner != owner {
				return locker.Record{}, &locker.HeldError{Holder: locker.Record{Resource: resource, Owner: r.owner}}
			}
			return m.Acquire(ctx, resource, owner, ttl)
		}}
	}, []string{"acquire-expired"}},

	{"the token is constant", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, acquire: func(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
			_, err := m.Acquire(ctx, resource, owner, ttl)
			if err != nil {
				return locker.Record{}, err
			}
			m.change(resource, func(r *memoryRow) { r.token = 1 })
			return m.Get(ctx, resource)
		}}
	}, []string{"acquire-again", "acquire-released", "tokens-rise", "counter"}},

	{"the token is a time in seconds", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, acquire: func(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
			rec, err := m.Acquire(ctx, resource, owner, ttl)
			if err == nil {
				m.change(resource, func(r *memoryRow) { r.token -= r.token % 1e6 })
				rec.Token -= rec.Token % 1e6
			}
			return rec, err
		}}
	}, []string{"acquire-released", "tokens-rise", "two-lockers"}},

	{"the token is a count that a purge forgets", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, acquire: func(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
			before := m.row(resource).token
			_, err := m.Acquire(ctx, resource, owner, ttl)
			if err != nil {
				return locker.Record{}, err
			}
			m.change(resource, func(r *memoryRow) { r.token = before + 1 })
			return m.Get(ctx, resource)
		}}
	}, []string{"tokens-rise"}},

	{"a release is forgotten", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, release: func(ctx context.Context, rec locker.Record) error {
			_, err := m.Renew(ctx, rec, long)
			return err
		}}
	}, []string{"acquire-released", "release-not-held", "two-lockers"}},

	{"release ignores the owner", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, release: func(ctx context.Context, rec locker.Record) error {
			_, err := m.ForceRelease(ctx, rec.Resource)
			return err
		}}
	}, []string{"acquire-held", "acquire-again", "release-not-owner", "names-owner"}},

	{"release ignores the token", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, release: func(ctx context.Context, rec locker.Record) error {
			rec.Token = 0
			return m.Release(ctx, rec)
		}}
	}, []string{"acquire-again", "release-not-owner"}},

	{"a release of nothing is no error", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, release: func(ctx context.Context, rec locker.Record) error {
			if err := m.Release(ctx, rec); !errors.Is(err, locker.ErrNotHeld) {
				return err
			}
			return nil
		}}
	}, []string{"release-not-held", "force-release"}},

	{"token 0 is anybody's", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, release: func(ctx context.Context, rec locker.Record) error {
			if holder, err := m.Get(ctx, rec.Resource); rec.Token == 0 && err == nil {
				rec.Owner = holder.Owner
			}
			return m.Release(ctx, rec)
		}}
	}, []string{"token-zero"}},

	{"a renewal adds to what is left", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, renew: func(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error) {
			before, _ := m.Get(ctx, rec.Resource)
			after, err := m.Renew(ctx, rec, ttl)
			if err != nil {
				return after, err
			}
			return m.Renew(ctx, rec, min(locker.MaxTTL, before.Remaining+ttl))
		}}
	}, []string{"renew-full-ttl", "renew-shortens"}},

	{"a renewal gives half of the ttl", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, renew: func(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error) {
			return m.Renew(ctx, rec, ttl/2)
		}}
	}, []string{"renew-full-ttl", "ttl-accepted"}},

	{"a renewal is a new grant", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, renew: func(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error) {
			if _, err := m.Renew(ctx, rec, ttl); err != nil {
				return locker.Record{}, err
			}
			return m.Acquire(ctx, rec.Resource, rec.Owner, ttl)
		}}
	}, []string{"renew-keeps-token", "renew-same-instant"}},

	{"a renewal never shortens", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, renew: func(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error) {
			if before, err := m.Get(ctx, rec.Resource); err == nil {
				ttl = max(ttl, before.Remaining)
			}
			return m.Renew(ctx, rec, ttl)
		}}
	}, []string{"renew-shortens"}},

	{"a renewal that changes nothing is refused", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, renew: func(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error) {
			before, err := m.Get(ctx, rec.Resource)
			if err == nil && before.ExpiresAt.Truncate(time.Second).Equal(time.Now().Add(ttl).Truncate(time.Second)) {
				return locker.Record{}, fmt.Errorf("%q: %w", rec.Resource, locker.ErrNotHeld)
			}
			return m.Renew(ctx, rec, ttl)
		}}
	}, []string{"renew-same-instant"}},

	{"renew ignores owner and token", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, renew: func(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error) {
			holder, err := m.Get(ctx, rec.Resource)
			if err != nil {
				return locker.Record{}, err
			}
			return m.Renew(ctx, holder, ttl)
		}}
	}, []string{"renew-not-owner", "names-owner"}},

	{"renew ignores the token", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, renew: func(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error) {
			rec.Token = 0
			return m.Renew(ctx, rec, ttl)
		}}
	}, []string{"acquire-again", "renew-not-owner"}},

	{"a renewal revives", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, renew: func(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error) {
			renewed, err := m.Renew(ctx, rec, ttl)
			if errors.Is(err, locker.ErrNotHeld) {
				return m.Acquire(ctx, rec.Resource, rec.Owner, ttl)
			}
			return renewed, err
		}}
	}, []string{"renew-not-held", "record-rebuilt", "force-release", "purge"}},

	{"select, then renew", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, renew: func(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error) {
			holder, err := m.Get(ctx, rec.Resource)
			switch {
			case err != nil:
				return locker.Record{}, err
			case holder.Owner != rec.Owner || holder.Token != rec.Token:
				return locker.Record{}, fmt.Errorf("%q: %w", rec.Resource, locker.ErrNotOwner)
			}
			time.Sleep(2 * time.Millisecond)
			m.change(rec.Resource, func(r *memoryRow) {
				r.owner, r.token, r.expires = rec.Owner, rec.Token, time.Now().Add(ttl).UnixMicro()
			})
			return m.Get(ctx, rec.Resource)
		}}
	}, []string{"renew-or-claim", "renew-or-release"}},

	{"get returns what expired", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, get: func(ctx context.Context, resource string) (locker.Record, error) {
			if r := m.row(resource); r.token != 0 {
				return r.record(resource), nil
			}
			return locker.Record{}, fmt.Errorf("%q: %w", resource, locker.ErrNotHeld)
		}}
	}, []string{"get", "acquire-expired", "release-not-held"}},

	{"times in the zone of the host", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, acquire: func(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
			rec, err := m.Acquire(ctx, resource, owner, ttl)
			zone := time.FixedZone("CEST", 7200)
			rec.AcquiredAt, rec.ExpiresAt = rec.AcquiredAt.In(zone), rec.ExpiresAt.In(zone)
			return rec, err
		}}
	}, []string{"record-times"}},

	{"times that the zone has bent", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, acquire: func(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
			rec, err := m.Acquire(ctx, resource, owner, ttl)
			rec.AcquiredAt, rec.ExpiresAt = rec.AcquiredAt.Add(time.Hour), rec.ExpiresAt.Add(time.Hour)
			return rec, err
		}}
	}, []string{"record-times", "acquire-free"}},

	{"times in seconds", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, get: func(ctx context.Context, resource string) (locker.Record, error) {
			rec, err := m.Get(ctx, resource)
			rec.AcquiredAt = rec.AcquiredAt.Truncate(time.Second)
			return rec, err
		}}
	}, []string{"record-times"}},

	{"remaining as of before the answer", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, acquire: func(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
			rec, err := m.Acquire(ctx, resource, owner, ttl)
			time.Sleep(5 * clockSlack)
			return rec, err
		}}
	}, []string{"record-remaining"}},

	{"remaining as of the last renewal", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, get: func(ctx context.Context, resource string) (locker.Record, error) {
			time.Sleep(5 * clockSlack)
			rec, err := m.Get(ctx, resource)
			if err == nil {
				rec.Remaining = time.Minute
			}
			return rec, err
		}}
	}, []string{"record-remaining"}},

	{"the times in a record decide", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, renew: func(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error) {
			if rec.IsExpired(time.Now()) {
				return locker.Record{}, fmt.Errorf("%q: %w", rec.Resource, locker.ErrNotHeld)
			}
			return m.Renew(ctx, rec, ttl)
		}}
	}, []string{"record-rebuilt"}},

	{"errors that name nothing", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, get: func(ctx context.Context, resource string) (locker.Record, error) {
			rec, err := m.Get(ctx, resource)
			if err != nil {
				err = locker.ErrNotHeld
			}
			return rec, err
		}}
	}, []string{"errors"}},

	{"errors that are all verdicts", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, release: func(ctx context.Context, rec locker.Record) error {
			if err := m.Release(ctx, rec); err != nil {
				return errors.Join(err, locker.ErrNotHeld, locker.ErrNotOwner)
			}
			return nil
		}}
	}, []string{"errors", "release-not-owner", "release-not-held", "context-cancelled"}},

	{"a ttl of whole seconds", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, acquire: func(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
			if _, err := locker.CheckTTL(ttl); err == nil {
				ttl = min((ttl + time.Second - 1).Truncate(time.Second), locker.MaxTTL)
			}
			return m.Acquire(ctx, resource, owner, ttl)
		}}
	}, []string{"ttl-accepted"}},

	{"a part of a millisecond is cut off", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, acquire: func(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
			return m.Acquire(ctx, resource, owner, ttl.Truncate(time.Millisecond))
		}}
	}, []string{"ttl-accepted"}},

	{"a ttl out of range is moved into it", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, renew: func(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error) {
			return m.Renew(ctx, rec, min(max(ttl, locker.MinTTL), locker.MaxTTL))
		}}
	}, []string{"ttl-rejected"}},

	{"the ttl is looked at too late", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, renew: func(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error) {
			if err := ctx.Err(); err != nil {
				return locker.Record{}, err
			}
			return m.Renew(ctx, rec, ttl)
		}}
	}, []string{"ttl-rejected", "names-rejected"}},

	{"resources fold case", func() locker.Locker {
		return renaming{newTestMemory(), strings.ToLower}
	}, []string{"names-resource", "names-bare"}},
	{"resources are trimmed", func() locker.Locker {
		return renaming{newTestMemory(), func(s string) string { return strings.TrimRight(s, " ") }}
	}, []string{"names-resource"}},
	{"resources are paths", func() locker.Locker {
		return renaming{newTestMemory(), path.Clean}
	}, []string{"names-resource", "names-bare"}},
	{"resources are cut", func() locker.Locker {
		return renaming{newTestMemory(), func(s string) string { return s[:min(len(s), 254)] }}
	}, []string{"names-resource"}},
	{"an empty resource has a default", func() locker.Locker {
		return renaming{newTestMemory(), func(s string) string {
			if s == "" {
				return "default"
			}
			return s
		}}
	}, []string{"names-rejected"}},
	{"resources are cleaned", func() locker.Locker {
		return renaming{newTestMemory(), func(s string) string { return strings.ReplaceAll(strings.ToValidUTF8(s, "\ufffd"), "\x00", "") }}
	}, []string{"names-rejected"}},

	{"owners fold case", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, acquire: func(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
			if holder, err := m.Get(ctx, resource); err == nil && strings.EqualFold(holder.Owner, owner) {
				owner = holder.Owner
			}
			return m.Acquire(ctx, resource, owner, ttl)
		}}
	}, []string{"names-owner"}},

	{"the context is ignored", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, acquire: func(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
			return m.Acquire(context.WithoutCancel(ctx), resource, owner, ttl)
		}, batch: func(ctx context.Context, recs []locker.Record, ttl time.Duration) ([]locker.Record, error) {
			return m.RenewBatch(context.WithoutCancel(ctx), recs, ttl)
		}, ping: func(ctx context.Context) error { return m.Ping(context.WithoutCancel(ctx)) }}
	}, []string{"context-cancelled", "context-expired", "blocked-context", "batch-rejected", "ping"}},

	{"an ended context is a refusal", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, acquire: func(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
			if ctx.Err() != nil {
				return locker.Record{}, &locker.HeldError{Holder: locker.Record{Resource: resource}}
			}
			return m.Acquire(ctx, resource, owner, ttl)
		}}
	}, []string{"context-cancelled", "context-expired"}},

	{"a deadline is a time-out of the network", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, acquire: func(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
			if _, ok := ctx.Deadline(); ok {
				<-ctx.Done()
				return locker.Record{}, errors.New("read tcp: i/o timeout")
			}
			return m.Acquire(ctx, resource, owner, ttl)
		}}
	}, []string{"context-expired", "context-tight"}},

	{"each Locker has a store of its own", func() locker.Locker {
		return newTestMemory() // called twice
	}, []string{"two-lockers", "one-winner"}},

	{"a batch is not sent", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, batch: func(_ context.Context, recs []locker.Record, _ time.Duration) ([]locker.Record, error) {
			return recs, nil
		}}
	}, []string{"batch", "batch-left-out", "batch-rejected", "batch-large"}},

	{"a batch is all or nothing", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, batch: func(ctx context.Context, recs []locker.Record, ttl time.Duration) ([]locker.Record, error) {
			renewed, err := m.RenewBatch(ctx, recs, ttl)
			if len(renewed) < len(recs) && err == nil {
				return nil, locker.ErrNotHeld
			}
			return renewed, err
		}}
	}, []string{"batch-left-out", "batch-duplicates", "batch-large"}},

	{"a batch looks at the owner alone", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, batch: func(ctx context.Context, recs []locker.Record, ttl time.Duration) (renewed []locker.Record, err error) {
			for _, rec := range recs {
				rec.Token = 0
				if r, err := m.Renew(ctx, rec, ttl); err == nil {
					renewed = append(renewed, r)
				}
			}
			return renewed, nil
		}}
	}, []string{"batch-left-out", "batch-rejected"}},

	{"a batch is cut", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, batch: func(ctx context.Context, recs []locker.Record, ttl time.Duration) ([]locker.Record, error) {
			return m.RenewBatch(ctx, recs[:min(len(recs), 1000)], ttl)
		}}
	}, []string{"batch-large"}},

	{"a hand-over keeps the token", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, handover: func(ctx context.Context, rec locker.Record, owner string, ttl time.Duration) (locker.Record, error) {
			if _, err := m.Renew(ctx, rec, ttl); err != nil {
				return locker.Record{}, err
			}
			m.change(rec.Resource, func(r *memoryRow) { r.owner = owner })
			return m.Get(ctx, rec.Resource)
		}}
	}, []string{"handover", "handover-refused", "tokens-rise"}},

	{"a hand-over gives what is left", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, handover: func(ctx context.Context, rec locker.Record, owner string, ttl time.Duration) (locker.Record, error) {
			if holder, err := m.Get(ctx, rec.Resource); err == nil {
				ttl = holder.Remaining
			}
			return m.Handover(ctx, rec, owner, ttl)
		}}
	}, []string{"handover"}},

	{"a hand-over is a release and an acquire", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, handover: func(ctx context.Context, rec locker.Record, owner string, ttl time.Duration) (locker.Record, error) {
			if err := m.Release(ctx, rec); err != nil {
				return locker.Record{}, err
			}
			time.Sleep(2 * time.Millisecond)
			return m.Acquire(ctx, rec.Resource, owner, ttl)
		}}
	}, []string{"handover-no-gap", "handover-refused"}},

	{"the list has no order", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, list: func(ctx context.Context, after string, limit int) ([]locker.Record, error) {
			recs, err := m.List(ctx, after, limit)
			slices.Reverse(recs)
			return recs, err
		}}
	}, []string{"list"}},

	{"the list is folded", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, list: func(ctx context.Context, after string, limit int) ([]locker.Record, error) {
			recs, err := m.List(ctx, "", 1<<30)
			recs = slices.DeleteFunc(recs, func(r locker.Record) bool { return strings.ToLower(r.Resource) <= strings.ToLower(after) })
			slices.SortFunc(recs, func(a, b locker.Record) int {
				return strings.Compare(strings.ToLower(a.Resource), strings.ToLower(b.Resource))
			})
			return recs[:min(limit, len(recs))], err
		}}
	}, []string{"list"}},

	{"the list has pages that are short", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, list: func(ctx context.Context, after string, limit int) ([]locker.Record, error) {
			return m.List(ctx, after, min(limit, 4))
		}}
	}, []string{"list"}},

	{"a forced release evicts nobody", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, force: func(ctx context.Context, resource string) (locker.Record, error) {
			return m.Get(ctx, resource)
		}}
	}, []string{"force-release"}},

	{"a forced release of nothing is no error", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, force: func(ctx context.Context, resource string) (locker.Record, error) {
			rec, err := m.ForceRelease(ctx, resource)
			if errors.Is(err, locker.ErrNotHeld) {
				err = nil
			}
			return rec, err
		}}
	}, []string{"force-release"}},

	{"a waiter sees no release", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, wait: func(ctx context.Context, _ locker.Record) error {
			<-ctx.Done()
			return ctx.Err()
		}}
	}, []string{"wait-free"}},

	{"a waiter does not wait", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, wait: func(context.Context, locker.Record) error { return nil }}
	}, []string{"wait-free"}},

	{"a purge takes what is held", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, purge: func(context.Context, time.Duration) (int64, error) {
			defer m.lock()()
			n := len(m.rows)
			clear(m.rows)
			return int64(n), nil
		}}
	}, []string{"purge"}},

	{"a purge takes what is not idle", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, purge: func(ctx context.Context, _ time.Duration) (int64, error) {
			return m.Purge(ctx, 0)
		}}
	}, []string{"purge"}},

	{"a lease is counted from before the wait", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, acquire: func(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
			begin := time.Now()
			if err := m.pass(ctx, resource); err != nil {
				return locker.Record{}, err
			}
			return m.Acquire(ctx, resource, owner, ttl-time.Since(begin).Truncate(10*time.Millisecond))
		}, renew: func(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error) {
			begin := time.Now()
			if err := m.pass(ctx, rec.Resource); err != nil {
				return locker.Record{}, err
			}
			return m.Renew(ctx, rec, ttl-time.Since(begin).Truncate(10*time.Millisecond))
		}}
	}, []string{"blocked-renew", "blocked-acquire"}},

	{"a lease is judged as of before the wait", func() locker.Locker {
		m := newTestMemory()
		return hooked{testMemory: m, renew: func(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error) {
			begin := time.Now()
			if err := m.pass(ctx, rec.Resource); err != nil {
				return locker.Record{}, err
			}
			m.change(rec.Resource, func(r *memoryRow) { r.expires = begin.Add(ttl).UnixMicro() })
			return locker.Record{Resource: rec.Resource, Owner: rec.Owner, Token: rec.Token, ExpiresAt: begin.Add(ttl)}, nil
		}}
	}, []string{"blocked-renew"}},

	{"a case that panics", func() locker.Locker {
		return hooked{testMemory: newTestMemory(), get: func(context.Context, string) (locker.Record, error) { panic("oh") }}
	}, []string{"get"}},
}

// TestBrokenLockers shows that the suite can fail.
func TestBrokenLockers(t *testing.T) {
	found := make(map[string]bool)
	for _, b := range brokenLockers {
		for _, name := range b.fails {
			found[name] = true
		}
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			one := b.locker()
			s := &suite{lockers: [2]locker.Locker{one, one}, short: true, patience: 200 * time.Millisecond}
			if b.name == "each Locker has a store of its own" {
				s.lockers[1] = b.locker()
			}
			s.mustFind(t, b.fails)
		})
	}
	for _, cs := range allCases() {
		if !found[cs.name] {
			t.Errorf("no broken Locker shows that %s can fail", cs.name)
		}
	}
}

// mustFind checks that the cases of these names fail.
func (s *suite) mustFind(t *testing.T, names []string) {
	t.Helper()
	byName := make(map[string]testCase)
	for _, cs := range allCases() {
		byName[cs.name] = cs
	}
	for _, name := range names {
		cs, ok := byName[name]
		if !ok {
			t.Fatalf("there is no case %q", name)
		}
		if reason := s.excludes(cs); reason != "" {
			t.Fatalf("%s is not run: %s", name, reason)
		}
		r := &recorder{}
		hung := s.run(r, cs, 3*time.Second)
		if len(r.failures) == 0 {
			t.Errorf("%s does not find it", name)
			continue
		}
		if want := "the rule: " + strings.Join(strings.Fields(cs.rule), " "); len(r.logs) != 1 || r.logs[0] != want {
			t.Errorf("%s logs %q, want %q", name, r.logs, want)
		}
		if testing.Verbose() {
			first, _, _ := strings.Cut(r.failures[0], "\n")
			t.Logf("%s (hung: %v): %s", name, hung, first)
		}
	}
}

// recorder is a tb that keeps what a *testing.T would print.
type recorder struct {
	mu             sync.Mutex
	logs, failures []string
}

func (*recorder) Helper() {}

func (r *recorder) Logf(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.logs = append(r.logs, fmt.Sprintf(format, args...))
}

func (r *recorder) Errorf(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failures = append(r.failures, fmt.Sprintf(format, args...))
}

// row returns a copy of the row of resource, live or not.
func (m *testMemory) row(resource string) memoryRow {
	defer m.lock()()
	if r := m.rows[resource]; r != nil {
		return *r
	}
	return memoryRow{}
}

// change writes to the row of resource, if there is one, as nobody should.
func (m *testMemory) change(resource string, write func(*memoryRow)) {
	defer m.lock()()
	if r := m.rows[resource]; r != nil {
		write(r)
	}
}

// renaming does to resources what it should not.
type renaming struct {
	*testMemory
	to func(string) string
}

func (l renaming) Acquire(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
	return l.testMemory.Acquire(ctx, l.to(resource), owner, ttl)
}

func (l renaming) Renew(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error) {
	rec.Resource = l.to(rec.Resource)
	return l.testMemory.Renew(ctx, rec, ttl)
}

func (l renaming) Release(ctx context.Context, rec locker.Record) error {
	rec.Resource = l.to(rec.Resource)
	return l.testMemory.Release(ctx, rec)
}

func (l renaming) Get(ctx context.Context, resource string) (locker.Record, error) {
	return l.testMemory.Get(ctx, l.to(resource))
}

// hooked has some of its verbs replaced.
type hooked struct {
	*testMemory
	acquire  func(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error)
	renew    func(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error)
	release  func(ctx context.Context, rec locker.Record) error
	get      func(ctx context.Context, resource string) (locker.Record, error)
	batch    func(ctx context.Context, recs []locker.Record, ttl time.Duration) ([]locker.Record, error)
	handover func(ctx context.Context, rec locker.Record, owner string, ttl time.Duration) (locker.Record, error)
	wait     func(ctx context.Context, held locker.Record) error
	list     func(ctx context.Context, after string, limit int) ([]locker.Record, error)
	force    func(ctx context.Context, resource string) (locker.Record, error)
	ping     func(ctx context.Context) error
	purge    func(ctx context.Context, idle time.Duration) (int64, error)
}

func (h hooked) Acquire(ctx context.Context, resource, owner string, ttl time.Duration) (locker.Record, error) {
	if h.acquire != nil {
		return h.acquire(ctx, resource, owner, ttl)
	}
	return h.testMemory.Acquire(ctx, resource, owner, ttl)
}

func (h hooked) Renew(ctx context.Context, rec locker.Record, ttl time.Duration) (locker.Record, error) {
	if h.renew != nil {
		return h.renew(ctx, rec, ttl)
	}
	return h.testMemory.Renew(ctx, rec, ttl)
}

func (h hooked) Release(ctx context.Context, rec locker.Record) error {
	if h.release != nil {
		return h.release(ctx, rec)
	}
	return h.testMemory.Release(ctx, rec)
}

func (h hooked) Get(ctx context.Context, resource string) (locker.Record, error) {
	if h.get != nil {
		return h.get(ctx, resource)
	}
	return h.testMemory.Get(ctx, resource)
}

func (h hooked) RenewBatch(ctx context.Context, recs []locker.Record, ttl time.Duration) ([]locker.Record, error) {
	if h.batch != nil {
		return h.batch(ctx, recs, ttl)
	}
	return h.testMemory.RenewBatch(ctx, recs, ttl)
}

func (h hooked) Handover(ctx context.Context, rec locker.Record, owner string, ttl time.Duration) (locker.Record, error) {
	if h.handover != nil {
		return h.handover(ctx, rec, owner, ttl)
	}
	return h.testMemory.Handover(ctx, rec, owner, ttl)
}

func (h hooked) WaitFree(ctx context.Context, held locker.Record) error {
	if h.wait != nil {
		return h.wait(ctx, held)
	}
	return h.testMemory.WaitFree(ctx, held)
}

func (h hooked) List(ctx context.Context, after string, limit int) ([]locker.Record, error) {
	if h.list != nil {
		return h.list(ctx, after, limit)
	}
	return h.testMemory.List(ctx, after, limit)
}

func (h hooked) ForceRelease(ctx context.Context, resource string) (locker.Record, error) {
	if h.force != nil {
		return h.force(ctx, resource)
	}
	return h.testMemory.ForceRelease(ctx, resource)
}

func (h hooked) Ping(ctx context.Context) error {
	if h.ping != nil {
		return h.ping(ctx)
	}
	return h.testMemory.Ping(ctx)
}

func (h hooked) Purge(ctx context.Context, idle time.Duration) (int64, error) {
	if h.purge != nil {
		return h.purge(ctx, idle)
	}
	return h.testMemory.Purge(ctx, idle)
}
