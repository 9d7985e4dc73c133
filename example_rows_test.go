package locker_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/locker-go/locker"
	"github.com/locker-go/locker/internal/testdb"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// identities switches the primary identity of a user at an external provider, which takes two calls. The lock is a column of the
// user's own row: ALTER TABLE users ADD identity_locked_at timestamptz, ADD identity_locked_by text.
type identities struct {
	rows     *locker.RowTable
	session  *locker.Session
	provider string
}

var errInProgress = errors.New("already in progress")

func (s *identities) switchPrimary(ctx context.Context, user int64, to string) error {
	ran, err := s.session.TryDo(ctx, strconv.FormatInt(user, 10), func(ctx context.Context, lease *locker.Lease) error {
		// No connection of the pool is held and no transaction is open during the calls. ctx ends before the lease does.
		for _, action := range []string{"unlink", "link?identity=" + to} {
			if err := s.call(ctx, lease.Token(), action); err != nil {
				return err
			}
		}
		return lease.ReleaseWith(ctx, func(ctx context.Context, rec locker.Record) error {
			return s.rows.Finish(ctx, rec, "primary_identity = ?", to) // the new value and the release, or neither
		})
	})
	if err == nil && !ran {
		return errInProgress
	}
	return err
}

func (s *identities) call(ctx context.Context, token int64, action string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.provider+"/"+action, nil)
	if err != nil {
		return err
	}
	req.Header.Set("Fencing-Token", strconv.FormatInt(token, 10)) // for a provider that can refuse a stale one
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return errors.New(res.Status)
	}
	return nil
}

// Two tabs at once: the second is told so at once.
func ExampleRowTable() {
	db, ctx := openDatabase(), context.Background()
	_, err := db.Exec(`CREATE TABLE users (id INTEGER PRIMARY KEY, primary_identity TEXT, identity_locked_at INTEGER, identity_locked_by TEXT);
		INSERT INTO users (id, primary_identity) VALUES (42, 'old')`)
	check(err)
	rows, err := locker.NewRowTable(ctx, db, locker.SQLite(), locker.RowSpec{
		Table: "users", Key: "id", LockedAt: "identity_locked_at", Owner: "identity_locked_by", TTL: 30 * time.Second,
	})
	check(err)
	session, err := locker.NewSession(rows)
	check(err)
	defer session.Close(ctx)

	switcher := &identities{rows: rows, session: session}
	secondTab := make(chan error, 1)
	provider := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/unlink" { // the second tab comes while the first one waits for the provider
			secondTab <- switcher.switchPrimary(ctx, 42, "newer")
		}
	}))
	defer provider.Close()
	switcher.provider = provider.URL

	fmt.Println(switcher.switchPrimary(ctx, 42, "new"), "/", <-secondTab)
	var identity string
	check(db.QueryRow(`SELECT primary_identity FROM users WHERE identity_locked_at IS NULL`).Scan(&identity))
	fmt.Println(identity)
	// Output:
	// <nil> / already in progress
	// new
}

// On every engine: nobody waits, the pool is idle during the calls, and a crash between them heals.
func TestTheIdentitySwitch(t *testing.T) {
	for _, e := range testdb.Engines(t) {
		for _, owner := range []string{"locked_by", ""} {
			t.Run(e.Name+"/"+owner, func(t *testing.T) {
				const ttl = time.Second
				d := fresh(t, e)
				db := d.pool(t)
				execute(t, db, fmt.Sprintf("CREATE TABLE users (id BIGINT PRIMARY KEY, primary_identity VARCHAR(40), locked_at %s NULL, locked_by %s NULL)",
					lockedAtType[e.Name], ownerType[e.Name]))
				execute(t, db, "INSERT INTO users (id, primary_identity) VALUES (42, 'old')")
				rows, err := locker.NewRowTable(t.Context(), db, dialect(e), users(owner, ttl))
				require.NoError(t, err)
				var during func(action string) int
				provider := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					w.WriteHeader(during(r.URL.Path))
				}))
				t.Cleanup(provider.Close)
				t.Cleanup(http.DefaultClient.CloseIdleConnections)
				app := func() *identities {
					s, err := locker.NewSession(rows)
					require.NoError(t, err)
					return &identities{rows, s, provider.URL}
				}
				identity := func() (name string) {
					require.NoError(t, db.QueryRowContext(t.Context(), "SELECT primary_identity FROM users WHERE id = 42").Scan(&name))
					return name
				}
				one, two := app(), app()
				t.Cleanup(func() { one.session.Close(context.Background()); two.session.Close(context.Background()) })

				calls := 0
				during = func(action string) int {
					calls++
					if calls > 2 {
						t.Error("the second tab has called the provider")
					}
					if !assert.Eventually(t, func() bool { return db.Stats().InUse == 0 }, time.Minute, time.Millisecond, "between heartbeats the pool is idle") {
						return http.StatusInternalServerError
					}
					assert.ErrorIs(t, one.switchPrimary(t.Context(), 42, "tab in the same process"), errInProgress)
					assert.ErrorIs(t, two.switchPrimary(t.Context(), 42, "tab on another node"), errInProgress)
					return http.StatusOK
				}
				require.NoError(t, one.switchPrimary(t.Context(), 42, "new"))
				assert.Equal(t, "new", identity())
				assert.ErrorIs(t, one.switchPrimary(t.Context(), 43, "new"), locker.ErrNoRow)

				// A failure between the calls frees the row, a crash leaves it locked for the TTL.
				during = func(action string) int { return map[string]int{"/unlink": 200, "/link": 503}[action] }
				assert.ErrorContains(t, one.switchPrimary(t.Context(), 42, "newer"), "503")
				assert.Equal(t, "new", identity())
				rec, err := rows.Acquire(t.Context(), "42", "crashed", ttl) // nobody renews it
				require.NoError(t, err)
				during = func(string) int { return http.StatusOK }
				assert.ErrorIs(t, two.switchPrimary(t.Context(), 42, "newest"), errInProgress)
				require.Eventually(t, func() bool { return two.switchPrimary(t.Context(), 42, "newest") == nil }, time.Minute, 5*time.Millisecond)
				assert.Equal(t, "newest", identity())
				err = rows.Finish(t.Context(), rec, "primary_identity = ?", "of a worker back from the dead")
				assert.ErrorIs(t, err, locker.ErrNotHeld)
				assert.Equal(t, "newest", identity())
			})
		}
	}
}

// The account is written only by a holder whose lease is live when it commits, whatever happened since it read the balance.
func ExampleTable_Guard() {
	db, ctx, dialect := openDatabase(), context.Background(), locker.SQLite()
	_, err := db.Exec(`CREATE TABLE account (id INTEGER PRIMARY KEY, cents INTEGER); INSERT INTO account VALUES (7, 100)`)
	check(err)
	table, err := locker.New(db, dialect)
	check(err)
	check(table.CreateTable(ctx))
	session, err := locker.NewSession(table)
	check(err)
	defer session.Close(ctx)

	write := func(ctx context.Context, lease *locker.Lease, cents int64) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if err := table.Guard(ctx, tx, lease.Record()); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `UPDATE account SET cents = ? WHERE id = 7`, cents); err != nil {
			return err
		}
		return tx.Commit()
	}
	err = session.Do(ctx, "account:7", func(ctx context.Context, lease *locker.Lease) error {
		var cents int64
		check(db.QueryRowContext(ctx, `SELECT cents FROM account WHERE id = 7`).Scan(&cents))
		for { // the work, such as a call to a bank, and then the result
			err := write(ctx, lease, cents-30)
			if !dialect.Retryable(err) { // a serialization failure or a deadlock: once more, until ctx ends with the lease
				return err
			}
		}
	})
	fmt.Println(err)
	// Output: <nil>
}

// A store that keeps the highest token it has seen as metadata of the object, and refuses a lower one.
func ExampleLease_Token_header() {
	table, ctx := openTable(), context.Background()
	type object struct {
		body  string
		token int64
	}
	var mu sync.Mutex
	objects := make(map[string]object)
	store := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		token, err := strconv.ParseInt(r.Header.Get("Fencing-Token"), 10, 64)
		mu.Lock()
		defer mu.Unlock()
		if err != nil || token < objects[r.URL.Path].token {
			w.WriteHeader(http.StatusPreconditionFailed)
			return
		}
		objects[r.URL.Path] = object{string(body), token}
	}))
	defer store.Close()
	put := func(body string, token int64) int {
		req, err := http.NewRequestWithContext(ctx, http.MethodPut, store.URL+"/report", strings.NewReader(body))
		check(err)
		req.Header.Set("Fencing-Token", strconv.FormatInt(token, 10))
		res, err := store.Client().Do(req)
		check(err)
		res.Body.Close()
		return res.StatusCode
	}
	stale, err := table.Acquire(ctx, "report", "one", time.Millisecond)
	check(err)
	var fresh locker.Record
	for fresh.Token == 0 { // until the stalled holder's lease is over
		fresh, _ = table.Acquire(ctx, "report", "two", time.Minute)
	}
	fmt.Println(put("fresh", fresh.Token), put("stale", stale.Token), put("fresher", fresh.Token))
	// Output: 200 412 200
}

// Complete the work and free the row in one statement.
func ExampleRowTable_Finish() {
	db, ctx := openDatabase(), context.Background()
	_, err := db.Exec(`CREATE TABLE jobs (id INTEGER PRIMARY KEY, state TEXT, locked_at INTEGER); INSERT INTO jobs VALUES (1, 'new', NULL)`)
	check(err)
	jobs, err := locker.NewRowTable(ctx, db, locker.SQLite(), locker.RowSpec{Table: "jobs", Key: "id", LockedAt: "locked_at", TTL: time.Minute})
	check(err)

	rec, err := jobs.Acquire(ctx, "1", "worker-1", jobs.TTL())
	check(err)
	check(jobs.Finish(ctx, rec, "state = ?", "done"))
	fmt.Println(errors.Is(jobs.Finish(ctx, rec, "state = ?", "done twice"), locker.ErrNotHeld))
	// Output: true
}
