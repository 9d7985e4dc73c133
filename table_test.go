package locker_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/locker-go/locker"
	"github.com/locker-go/locker/internal/testdb"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestTableOptionsAreChecked(t *testing.T) {
	db := testdb.SQLite(t).Open(t)
	for name, o := range map[string]locker.Option{
		"table empty":       locker.WithTable(""),
		"empty part":        locker.WithTable("a..b"),
		"trailing dot":      locker.WithTable("a."),
		"three parts":       locker.WithTable("a.b.c"),
		"open quote":        locker.WithTable(`"a`),
		"after the quote":   locker.WithTable(`"a"b`),
		"NUL":               locker.WithTable("a\x00b"),
		"not UTF-8":         locker.WithTable("a\xff"),
		"cut by PostgreSQL": locker.WithTable(strings.Repeat("x", 64)),
		"skew 0":            locker.WithClockSkew(0),
	} {
		_, err := locker.New(db, locker.SQLite(), o)
		assert.ErrorIs(t, err, locker.ErrInvalid, name)
	}
	tb, err := locker.New(db, locker.SQLite(), locker.WithClockSkew(time.Second))
	require.NoError(t, err)
	assert.Equal(t, time.Second, tb.ClockSkew())
	_, err = locker.New(nil, locker.SQLite())
	assert.ErrorIs(t, err, locker.ErrInvalid)
	_, err = locker.New(db, nil)
	assert.ErrorIs(t, err, locker.ErrInvalid)
	_, err = locker.New(db, broken{locker.SQLite()})
	assert.ErrorContains(t, err, "Renew")
}

// broken is a dialect with a parameter that there is not.
type broken struct{ locker.Dialect }

func (b broken) Statements(table string) locker.Statements {
	s := b.Dialect.Statements(table)
	s.Renew = "UPDATE x SET y = :nothing"
	return s
}

// A name means exactly the table that it names, in the schema that it names, and never SQL.
func TestTableNames(t *testing.T) {
	for _, e := range testdb.Engines(t) {
		t.Run(e.Name, func(t *testing.T) {
			d := fresh(t, e)
			db := d.pool(t)
			db.SetMaxOpenConns(1) // what is attached in SQLite is so on one connection
			execute(t, db, "CREATE TABLE victim (id INTEGER)")
			execute(t, db, "CREATE TABLE locks (id INTEGER)") // a decoy: unqualified names mean this one
			schema := fmt.Sprintf("app%d", time.Now().UnixNano())
			odd := "4b5d-x." + schema
			quoted := `"` + odd + `".`
			switch e.Name {
			case "postgres":
				execute(t, db, fmt.Sprintf(`CREATE SCHEMA %s; CREATE SCHEMA "%s"`, schema, odd))
				t.Cleanup(func() { db.Exec(fmt.Sprintf(`DROP SCHEMA %s CASCADE; DROP SCHEMA "%s" CASCADE`, schema, odd)) })
			case "mysql":
				odd = strings.ReplaceAll(odd, ".", "-")
				quoted = odd + "."
				for _, s := range []string{schema, odd} {
					execute(t, db, "CREATE DATABASE `"+s+"`")
					t.Cleanup(func() { db.Exec("DROP DATABASE `" + s + "`") })
				}
			case "sqlite":
				execute(t, db, "ATTACH ':memory:' AS "+schema)
				execute(t, db, `ATTACH ':memory:' AS "`+odd+`"`)
			}
			for _, name := range []string{
				schema + ".locks", quoted + "locks", quoted + `"Lock""Table"`,
				"lock", "select", "Order", "ünïcode", "with space", "a:b", "a::b", "what?", "$1", "a'b", "percent%s",
				"locks; DROP TABLE victim; --", `x" WHERE 1=1; DROP TABLE victim; --`, "`; DROP TABLE victim; --", `"dot.ted"`,
			} {
				tb, err := locker.New(db, dialect(e), locker.WithTable(name))
				require.NoError(t, err, name)
				require.NoError(t, tb.CreateTable(t.Context()), name)
				require.NoError(t, tb.CreateTable(t.Context()), name)
				rec, err := tb.Acquire(t.Context(), "r", "o", time.Hour)
				require.NoError(t, err, name)
				_, err = tb.Acquire(t.Context(), "r", "other", time.Hour)
				require.ErrorIs(t, err, locker.ErrHeld, name)
				rec, err = tb.Renew(t.Context(), rec, time.Hour)
				require.NoError(t, err, name)
				batch, err := tb.RenewBatch(t.Context(), []locker.Record{rec}, time.Hour)
				require.NoError(t, err, name)
				require.Len(t, batch, 1, name)
				live, err := tb.List(t.Context(), "", 10)
				require.NoError(t, err, name)
				require.Len(t, live, 1, "each its own table: %s", name)
				require.NoError(t, tb.Release(t.Context(), rec), name)
				_, err = tb.Purge(t.Context(), 0)
				require.NoError(t, err, name)
			}
			assert.Zero(t, number(t, db, "SELECT count(*) FROM victim"))
			assert.Zero(t, number(t, db, "SELECT count(id) FROM locks"))
		})
	}
}

func TestCreateTableIsSafeWhenManyStartAtOnce(t *testing.T) {
	for _, e := range append(testdb.Engines(t), testdb.SQLitePlain(t)) {
		t.Run(e.Name, func(t *testing.T) {
			d := fresh(t, e)
			start := make(chan struct{})
			var all sync.WaitGroup
			for range 16 {
				db := d.pool(t)
				all.Go(func() {
					tb, err := locker.New(db, dialect(e))
					assert.NoError(t, err)
					<-start
					assert.NoError(t, tb.CreateTable(t.Context()))
				})
			}
			close(start)
			all.Wait()
		})
	}
}

func TestDDLIsWhatCreateTableDoes(t *testing.T) {
	for _, e := range testdb.Engines(t) {
		t.Run(e.Name, func(t *testing.T) {
			db := fresh(t, e).pool(t)
			tb, err := locker.New(db, dialect(e), locker.WithTable("a:b"))
			require.NoError(t, err)
			for _, s := range strings.Split(strings.TrimSuffix(tb.DDL(), ";\n"), ";\n") {
				execute(t, db, s)
			}
			_, err = tb.Acquire(t.Context(), "r", "o", time.Hour)
			assert.NoError(t, err)
		})
	}
}

// A set-up that cannot work is said so at once, with the driver's error, and is never "held".
func TestASetUpErrorIsNotHeld(t *testing.T) {
	for _, e := range testdb.Engines(t) {
		t.Run(e.Name, func(t *testing.T) {
			d := fresh(t, e)
			admin := d.pool(t)
			check := func(what string, db *sql.DB, wait bool) error {
				t.Helper()
				tb, err := locker.New(db, dialect(e))
				require.NoError(t, err)
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				_, acquire := tb.Acquire(ctx, "r", "o", time.Hour)
				errs := []error{acquire}
				if wait {
					_, err := session(t, tb).Lock(ctx, "r")
					errs = append(errs, err)
				}
				for _, err := range errs {
					require.Error(t, err, what)
					for _, not := range []error{locker.ErrHeld, locker.ErrNotHeld, locker.ErrNotOwner, context.DeadlineExceeded} {
						assert.NotErrorIs(t, err, not, what)
					}
				}
				return acquire
			}
			assert.ErrorContains(t, check("no table", admin, true), "CreateTable")
			tb := d.table(t)
			rec := acquire(t, tb, "mine")

			var reader *sql.DB
			user := fmt.Sprintf("reader%d", time.Now().UnixNano())
			switch e.Name {
			case "postgres":
				var schema string
				require.NoError(t, admin.QueryRow("SELECT current_schema").Scan(&schema))
				execute(t, admin, fmt.Sprintf("CREATE ROLE %s LOGIN; GRANT USAGE ON SCHEMA %s TO %[1]s; GRANT SELECT ON distributed_locks TO %[1]s", user, schema))
				t.Cleanup(func() { admin.Exec(fmt.Sprintf("DROP OWNED BY %s; DROP ROLE %[1]s", user)) })
				reader = d.with("role=" + user).pool(t)
				execute(t, admin, "ALTER TABLE distributed_locks ADD CHECK (resource <> 'r')")
				assert.ErrorContains(t, check("a constraint", admin, true), "check constraint")
				// That may pass, with the fail-over that made it so; who waits goes on waiting.
				check("read only", d.with("default_transaction_read_only=on").pool(t), false)
			case "mysql":
				execute(t, admin, fmt.Sprintf("CREATE USER %s", user))
				t.Cleanup(func() { admin.Exec("DROP USER " + user) })
				execute(t, admin, fmt.Sprintf("GRANT SELECT ON distributed_locks TO %s", user))
				reader = testdb.Open(t, "mysql", strings.Replace(d.dsn, "root@", user+"@", 1))
			case "sqlite":
				reader = d.with("mode=ro").pool(t)
			}
			check("no privilege", reader, true)
			ro, err := locker.New(reader, dialect(e))
			require.NoError(t, err)
			require.NoError(t, ro.CreateTable(t.Context()), "who may only read has nothing to create")
			seen, err := ro.Get(t.Context(), "mine")
			require.NoError(t, err)
			assert.Equal(t, rec.Token, seen.Token)
		})
	}
}

// One statement and one round trip a verb, won or lost, with the driver's default DSN. The MySQL dialect may read once more to say
// why a change was refused.
func TestRoundTrips(t *testing.T) {
	for _, e := range servers(t) {
		t.Run(e.Name, func(t *testing.T) {
			d := fresh(t, e)
			w := testdb.Proxy(t, d.dsn)
			d.dsn = w.Through(d.dsn)
			tb := d.table(t)
			tb.db.SetMaxOpenConns(1)
			reason := map[string]int{"postgres": 0, "mysql": 1}[e.Name]

			var rec locker.Record
			many := make([]locker.Record, 2500)
			verbs := []struct {
				name string
				most int
				do   func() error
				want error
			}{
				{"acquire, granted", 1, func() (err error) { rec, err = tb.Acquire(t.Context(), "r", "o", time.Hour); return err }, nil},
				{"acquire, refused", 1 + reason, func() (err error) { _, err = tb.Acquire(t.Context(), "r", "loser", time.Hour); return err }, locker.ErrHeld},
				{"renew", 1, func() (err error) { _, err = tb.Renew(t.Context(), rec, time.Hour); return err }, nil},
				{"renew, refused", 1 + reason, func() (err error) {
					_, err = tb.Renew(t.Context(), locker.Record{Resource: "r", Owner: "loser", Token: 1}, time.Hour)
					return err
				}, locker.ErrNotOwner},
				{"get", 1, func() (err error) { _, err = tb.Get(t.Context(), "r"); return err }, nil},
				{"get, free", 1, func() (err error) { _, err = tb.Get(t.Context(), "free"); return err }, locker.ErrNotHeld},
				{"renew 2,500", 3, func() (err error) { _, err = tb.RenewBatch(t.Context(), many, time.Hour); return err }, nil},
				{"handover", 1, func() (err error) { rec, err = tb.Handover(t.Context(), rec, "next", time.Hour); return err }, nil},
				{"list", 1, func() (err error) { _, err = tb.List(t.Context(), "", 100); return err }, nil},
				{"release", 1, func() error { return tb.Release(t.Context(), rec) }, nil},
				{"release, refused", 1 + reason, func() error { return tb.Release(t.Context(), rec) }, locker.ErrNotHeld},
				{"acquire, again", 1, func() (err error) { rec, err = tb.Acquire(t.Context(), "r", "o", time.Hour); return err }, nil},
				{"force", 2, func() (err error) { _, err = tb.ForceRelease(t.Context(), "r"); return err }, nil},
			}
			for i := range many {
				many[i] = locker.Record{Resource: fmt.Sprintf("many %d", i), Owner: "o"}
			}
			insertMany(t, tb, many)
			for round := range 3 { // the first one prepares the statements
				for _, v := range verbs {
					w.Reset()
					require.ErrorIs(t, v.do(), v.want, v.name)
					if round > 0 {
						// pgx asks a connection that was idle for a second whether it lives.
						assert.LessOrEqual(t, w.RoundTrips(), v.most, v.name)
						assert.Positive(t, w.RoundTrips(), v.name)
					}
				}
			}
		})
	}
}

// insertMany makes recs live locks, and sets their tokens.
func insertMany(t *testing.T, tb table, recs []locker.Record) {
	t.Helper()
	var b strings.Builder
	for i, r := range recs {
		b.WriteString(map[bool]string{true: "", false: ", "}[i == 0] + "('" + r.Resource + "', '" + r.Owner + "', ")
		b.WriteString(map[string]string{
			"postgres": "to_timestamp(1796000000), clock_timestamp() + interval '1 hour')",
			"mysql":    "DATE'1970-01-01' + INTERVAL 1796000000 SECOND, UTC_TIMESTAMP(6) + INTERVAL 1 HOUR)",
			"sqlite":   "1796000000000000, (unixepoch() + 3600) * 1000000)",
		}[tb.e.Name])
		recs[i].Token = 1796000000 * 1_000_000
	}
	execute(t, tb.db, "INSERT INTO distributed_locks VALUES "+b.String())
}

// One error is one rollback and a line in the server's log; a lock that is held is neither.
func TestContentionIsNoErrorOfTheServer(t *testing.T) {
	s := testdb.Start(t, "postgres", testdb.Options{})
	tb := database{s.Engine(), s.DSN()}.table(t)
	acquire(t, tb, "r")
	rollbacks := "SELECT xact_rollback FROM pg_stat_database WHERE datname = current_database()"
	commits := "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
	refuse := func() int64 {
		done := number(t, tb.db, commits)
		for range 100 {
			_, err := tb.Acquire(t.Context(), "r", "loser", time.Hour)
			require.ErrorIs(t, err, locker.ErrHeld)
		}
		require.Eventually(t, func() bool { return number(t, tb.db, commits) >= done+100 }, time.Minute, 100*time.Millisecond, "statistics come late")
		return number(t, tb.db, rollbacks)
	}
	refuse()
	before := refuse()
	assert.Equal(t, before, refuse())
}

func TestSessionsOnRealEngines(t *testing.T) {
	for _, e := range testdb.Engines(t) {
		t.Run(e.Name, func(t *testing.T) {
			const ttl = time.Second
			d := fresh(t, e)
			a, b := session(t, d.table(t), locker.WithTTL(ttl)), session(t, d.table(t), locker.WithTTL(ttl))
			var held []*locker.Lease
			for i := range 20 {
				held = append(held, lock(t, a, fmt.Sprint("r", i)))
			}
			token := held[0].Token()
			for begin := time.Now(); time.Since(begin) < 3*ttl; {
				_, err := b.TryLock(t.Context(), "r0")
				require.ErrorIs(t, err, locker.ErrHeld)
			}
			for _, l := range held {
				require.NoError(t, l.Err())
			}
			assert.Equal(t, token, held[0].Token())

			// Both sessions want the same, many times over.
			var n int
			var all sync.WaitGroup
			for i := range 10 {
				all.Go(func() {
					for range 20 {
						err := []*locker.Session{a, b}[i%2].Do(t.Context(), "n", func(context.Context, *locker.Lease) error {
							before := n
							n = before + 1
							return nil
						}, locker.WithTTL(time.Minute))
						if !assert.NoError(t, err) {
							return
						}
					}
				})
			}
			all.Wait()
			assert.Equal(t, 200, n)

			ctx, cancel := held[1].Context(t.Context())
			defer cancel()
			tb := d.table(t)
			evicted, err := tb.ForceRelease(t.Context(), "r1")
			require.NoError(t, err)
			assert.Equal(t, held[1].Record().Owner, evicted.Owner)
			<-ctx.Done()
			assert.ErrorIs(t, context.Cause(ctx), locker.ErrLost)
			assert.ErrorIs(t, context.Cause(ctx), locker.ErrNotHeld)
			require.NoError(t, held[0].Err())
		})
	}
}

// A lease owns no connection; but a pool that the application has drained cannot renew. Then the signal comes in time, and Release
// does not hang. With a small pool of their own, locks do not notice.
func TestADrainedPool(t *testing.T) {
	for _, e := range testdb.Engines(t) {
		t.Run(e.Name, func(t *testing.T) {
			const ttl = 1200 * time.Millisecond
			d := fresh(t, e)
			tb, own := d.table(t), d.table(t)
			tb.db.SetMaxOpenConns(1)
			own.db.SetMaxOpenConns(2)
			s, safe := session(t, tb, locker.WithTTL(ttl)), session(t, own, locker.WithTTL(ttl))
			var held []*locker.Lease
			for i := range 50 {
				held = append(held, lock(t, s, fmt.Sprint("r", i)))
			}
			other := lock(t, safe, "safe")
			for begin := time.Now(); time.Since(begin) < 2*ttl; { // 50 leases on one connection, and it is free for others
				require.NoError(t, tb.db.PingContext(t.Context()))
			}
			for _, l := range held {
				require.NoError(t, l.Err())
			}
			ctx, cancel := held[0].Context(t.Context())
			defer cancel()
			conn, err := tb.db.Conn(t.Context()) // drained
			require.NoError(t, err)
			ends := held[0].Record().ExpiresAt
			<-ctx.Done()
			assert.ErrorIs(t, context.Cause(ctx), locker.ErrLost)
			assert.Less(t, time.Now(), ends.Add(ttl), "of the last renewal at the latest")
			assert.ErrorIs(t, held[0].Release(t.Context()), locker.ErrLost)
			assert.NoError(t, other.Err())
			require.NoError(t, conn.Close())
			require.Eventually(t, func() bool {
				l, err := s.TryLock(t.Context(), "r0")
				return err == nil && l.Release(t.Context()) == nil
			}, time.Minute, 10*time.Millisecond, "all is well without a restart")
		})
	}
}

// Ten thousand leases are ten statements a round.
func TestTenThousandLeasesAreTenStatementsARound(t *testing.T) {
	if testing.Short() {
		t.Skip("long")
	}
	for _, e := range servers(t) {
		t.Run(e.Name, func(t *testing.T) {
			const n = 10_000
			d := fresh(t, e)
			w := testdb.Proxy(t, d.dsn)
			d.dsn = w.Through(d.dsn)
			tb := d.table(t)
			tb.db.SetMaxIdleConns(8)
			s := session(t, keeping{tb}, locker.WithTTL(15*time.Second))
			names := make(chan int, n)
			for i := range n {
				names <- i
			}
			close(names)
			leases := make([]*locker.Lease, n)
			var all sync.WaitGroup
			for range 8 {
				all.Go(func() {
					for i := range names {
						l, err := s.TryLock(t.Context(), fmt.Sprint("r", i))
						if !assert.NoError(t, err) {
							return
						}
						leases[i] = l
					}
				})
			}
			all.Wait()
			require.False(t, t.Failed())
			round := func() { // waits until each lease was renewed
				t.Helper()
				var before time.Time
				for _, l := range leases {
					if at := l.Record().ExpiresAt; at.After(before) {
						before = at
					}
				}
				require.Eventually(t, func() bool {
					for _, l := range leases {
						if !l.Record().ExpiresAt.After(before) {
							return false
						}
					}
					return true
				}, time.Minute, 10*time.Millisecond)
			}
			round()
			w.Reset()
			round()
			assert.LessOrEqual(t, w.RoundTrips(), 10+2, "at most a ping of an idle connection besides")
			assert.GreaterOrEqual(t, w.RoundTrips(), 10)
			for _, l := range leases {
				require.NoError(t, l.Err())
			}
		})
	}
}

// keeping is a Table without the releases, of which Close would send ten thousand.
type keeping struct{ table }

func (keeping) Release(context.Context, locker.Record) error { return nil }

func TestPurgeDeletesInBatchesWhatIsIdle(t *testing.T) {
	for _, e := range testdb.Engines(t) {
		t.Run(e.Name, func(t *testing.T) {
			tb := fresh(t, e).table(t)
			many := make([]locker.Record, 2500)
			for i := range many {
				many[i] = locker.Record{Resource: fmt.Sprintf("many %04d", i), Owner: "o"}
			}
			insertMany(t, tb, many)
			n, err := tb.Purge(t.Context(), 0)
			require.NoError(t, err)
			assert.Zero(t, n, "all are live")
			execute(t, tb.db, "UPDATE distributed_locks SET expires_at = acquired_at WHERE resource <> 'many 0007'")
			n, err = tb.Purge(t.Context(), 24*time.Hour*365)
			require.NoError(t, err)
			assert.Zero(t, n, "none was idle for that long")
			n, err = tb.Purge(t.Context(), time.Hour)
			require.NoError(t, err)
			assert.EqualValues(t, 2499, n)
			_, err = tb.Get(t.Context(), "many 0007")
			assert.NoError(t, err)
		})
	}
}

func TestErrorsSayWhatAndWhy(t *testing.T) {
	tb := fresh(t, testdb.SQLite(t)).table(t)
	rec := acquire(t, tb, "invoice-7")
	_, err := tb.Acquire(t.Context(), "invoice-7", "me", time.Hour)
	assert.ErrorContains(t, err, "invoice-7")
	assert.ErrorContains(t, err, `held by "o"`)
	rec.Token--
	assert.ErrorContains(t, tb.Release(t.Context(), rec), "invoice-7")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = tb.Renew(ctx, rec, time.Hour)
	assert.True(t, errors.Is(err, context.Canceled))
	assert.ErrorContains(t, err, "invoice-7")
}
