package locker_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/locker-go/locker"
	"github.com/locker-go/locker/internal/testdb"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A guarded transaction is committed on one node while the lock is claimed on another. Galera puts both in one order, the cluster's,
// and by Guard's promise the transaction comes first or not at all. A share lock on the row, which does on one server, does not here:
// other nodes know nothing of it, and a transaction in the middle of its commit is not stopped by a claim that came before it.
func TestGuardOnGalera(t *testing.T) {
	nodes := testdb.Galera(t, 2, testdb.Options{Args: []string{"--log-bin=binlog", "--log-slave-updates"}})
	for _, c := range []struct {
		name    string
		guard   func(context.Context, table, *sql.Tx, locker.Record) error
		commits int
		holds   bool
	}{
		{"guard", func(ctx context.Context, tb table, tx *sql.Tx, rec locker.Record) error {
			return tb.Guard(ctx, tx, rec)
		}, 2000, true},
		{"share lock", guardByShareLock, 500, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			begin, r := time.Now(), newRace(t, nodes, c.guard)
			for enough := false; !enough && time.Since(begin) < 2*time.Minute && !t.Failed(); {
				r.round(t, time.Second)
				enough = r.commits >= c.commits && (c.holds || r.violations > 0)
			}
			t.Logf("%d guarded commits, %d of them after a later claim; %d claims, %d guards refused, errors by number: %v; %v",
				r.commits, r.violations, r.claims, r.refused, r.errors, time.Since(begin).Round(time.Millisecond))
			assert.Greater(t, r.commits, 200)
			assert.Equal(t, c.holds, r.violations == 0)
		})
	}
}

func guardByShareLock(ctx context.Context, _ table, tx *sql.Tx, rec locker.Record) error {
	var one int
	err := tx.QueryRowContext(ctx, `SELECT 1 FROM distributed_locks WHERE resource = ? AND owner = ?
		AND TIMESTAMPDIFF(MICROSECOND, DATE'1970-01-01', acquired_at) = ? AND expires_at > UTC_TIMESTAMP(6) LOCK IN SHARE MODE`,
		rec.Resource, rec.Owner, rec.Token).Scan(&one)
	if errors.Is(err, sql.ErrNoRows) {
		return locker.ErrLost
	}
	return err
}

// A race is for a few locks, each with a holder on every node.
type race struct {
	guard  func(context.Context, table, *sql.Tx, locker.Record) error
	tables []table // by node

	mu      sync.Mutex
	turns   int
	refused int
	errors  map[uint16]int

	// By the binary log of the first node, so far.
	observer                    *sql.DB
	file                        string
	read                        int64
	holder                      map[string]string
	claims, commits, violations int
}

const raceTTL = 20 * time.Millisecond

func newRace(t *testing.T, nodes []*testdb.Server, guard func(context.Context, table, *sql.Tx, locker.Record) error) *race {
	r := &race{guard: guard, errors: make(map[uint16]int), holder: make(map[string]string)}
	d := fresh(t, nodes[0].Engine())
	for _, s := range nodes {
		on := d
		on.dsn = strings.Replace(d.dsn, fmt.Sprintf(":%d)", nodes[0].Port()), fmt.Sprintf(":%d)", s.Port()), 1)
		tb := on.table(t)
		tb.db.SetMaxOpenConns(16)
		tb.db.SetMaxIdleConns(16)
		r.tables = append(r.tables, tb)
	}
	r.observer = d.with("wsrep_sync_wait=1").pool(t)
	execute(t, r.observer, "CREATE TABLE written (resource VARCHAR(20), owner VARCHAR(20), PRIMARY KEY (resource, owner))")
	var do, ignore string
	require.NoError(t, r.observer.QueryRowContext(t.Context(), "SHOW MASTER STATUS").Scan(&r.file, &r.read, &do, &ignore))
	return r
}

// round lets them race for d and judges.
func (r *race) round(t *testing.T, d time.Duration) {
	until := time.Now().Add(d)
	var all sync.WaitGroup
	for _, tb := range r.tables {
		for i := range 8 {
			all.Go(func() {
				for time.Now().Before(until) && !t.Failed() {
					r.turn(t, tb, fmt.Sprint("lock ", i))
				}
			})
		}
	}
	all.Wait()
	r.judge(t)
}

// turn is one claim and what its holder, who is late now and then, writes under it.
func (r *race) turn(t *testing.T, tb table, resource string) {
	r.mu.Lock()
	r.turns++
	owner := fmt.Sprint("owner ", r.turns)
	r.mu.Unlock()
	rec, err := tb.Acquire(t.Context(), resource, owner, raceTTL)
	var held *locker.HeldError
	if errors.As(err, &held) {
		time.Sleep(held.Holder.Remaining)
		return
	}
	if err == nil {
		err = r.write(t.Context(), tb, rec)
	}
	var e *mysql.MySQLError
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case err == nil:
	case errors.Is(err, locker.ErrLost):
		r.refused++
	case errors.As(err, &e) && slices.Contains([]uint16{1213, 1205, 1020, 1047}, e.Number): // what users of a cluster live with
		r.errors[e.Number]++
	default:
		t.Error(err)
	}
}

func (r *race) write(ctx context.Context, tb table, rec locker.Record) error {
	ends := time.Now().Add(rec.Remaining)
	time.Sleep(rand.N(raceTTL / 2))
	tx, err := tb.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	steps := []func() error{
		func() error {
			_, err := tx.ExecContext(ctx, "INSERT INTO written VALUES (?, ?)", rec.Resource, rec.Owner)
			return err
		},
		func() error { return r.guard(ctx, tb, tx, rec) },
	}
	rand.Shuffle(len(steps), func(i, j int) { steps[i], steps[j] = steps[j], steps[i] })
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
		time.Sleep(rand.N(raceTTL / 4))
	}
	if rand.N(2) == 0 {
		time.Sleep(rand.N(raceTTL))
	} else {
		time.Sleep(time.Until(ends) + rand.N(raceTTL/4)) // when the others claim
	}
	return tx.Commit()
}

var (
	claimed = regexp.MustCompile("^INSERT INTO `distributed_locks`[^']*'(lock \\d)', '(owner \\d+)'")
	written = regexp.MustCompile(`^INSERT INTO written VALUES \('(lock \d)', '(owner \d+)'\)`)
)

// judge reads on in the binary log, which is in the order of the cluster. (The connection that wrote can be asked for its place in the
// order too, WSREP_LAST_WRITTEN_GTID, but is not told where a commit went that was replayed, and those are the ones that matter here.)
func (r *race) judge(t *testing.T) {
	rows := number(t, r.observer, "SELECT count(*) FROM written") // waits until the node has all
	log, err := r.observer.QueryContext(t.Context(), fmt.Sprintf("SHOW BINLOG EVENTS IN '%s' FROM %d", r.file, r.read))
	require.NoError(t, err)
	defer log.Close()
	for log.Next() {
		var file, pos, kind, server, text string
		require.NoError(t, log.Scan(&file, &pos, &kind, &server, &r.read, &text))
		if kind != "Annotate_rows" {
			continue
		}
		if m := claimed.FindStringSubmatch(text); m != nil {
			r.claims++
			r.holder[m[1]] = m[2]
		} else if m := written.FindStringSubmatch(text); m != nil {
			r.commits++
			if r.holder[m[1]] != m[2] {
				r.violations++
			}
		}
	}
	require.NoError(t, log.Err())
	require.EqualValues(t, rows, r.commits, "the log does not have all")
	require.GreaterOrEqual(t, r.claims, r.commits, "the log does not have all")
}
