package main

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/locker-go/locker/internal/testdb"
)

// The verbs, from the shell's side, on every engine.
func TestVerbs(t *testing.T) {
	onEngines(t, func(t *testing.T, w *world) {
		const name = "it's a \"name\"\n\x1b[31m <&> 😀"

		r := w.run("get", name)
		assert.Equal(t, exitFree, r.code)
		assert.Empty(t, r.out)

		r = w.run("acquire", name, "--ttl", "1m", "--json")
		require.Equal(t, 0, r.code, r.err)
		got := decode(t, r.out)
		rec := w.holder(name)
		assert.Equal(t, name, got["resource"])
		assert.Equal(t, rec.Owner, got["owner"])
		assert.Equal(t, json.Number(fmt.Sprint(rec.Token)), got["token"])
		assert.Equal(t, instant(rec.AcquiredAt), got["acquired_at"])
		assert.Equal(t, instant(rec.ExpiresAt), got["expires_at"])
		left, err := got["remaining_ms"].(json.Number).Int64()
		require.NoError(t, err)
		assert.InDelta(t, 60_000, left, 30_000)
		assert.Len(t, got, 6)
		assert.Regexp(t, `^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$`, got["expires_at"])

		r = w.run("acquire", name)
		assert.Equal(t, exitHeld, r.code)
		assert.Contains(t, r.err, rec.Owner)
		assert.Empty(t, r.out)

		r = w.run("get", name, "--json")
		assert.Equal(t, got["token"], decode(t, r.out)["token"])
		r = w.run("get", name)
		assert.Equal(t, 5, len(lines(r.out)), "names cannot break the output: %s", r.out)
		assert.NotContains(t, r.out, "\x1b")

		// Renew: any grant of the owner, this grant, another grant, another owner.
		r = w.run("renew", name, "--owner", rec.Owner, "--ttl", "2m", "--json")
		require.Equal(t, 0, r.code, r.err)
		assert.Equal(t, got["token"], decode(t, r.out)["token"])
		assert.Greater(t, decode(t, r.out)["expires_at"], got["expires_at"])
		token := fmt.Sprint(rec.Token)
		assert.Equal(t, 0, w.run("renew", name, "--owner", rec.Owner, "--token", token).code)
		assert.Equal(t, exitLost, w.run("renew", name, "--owner", rec.Owner, "--token", "7").code)
		assert.Equal(t, exitLost, w.run("renew", name, "--owner", "me", "--token", token).code)
		assert.Equal(t, exitLost, w.run("renew", "other", "--owner", "me").code)

		// Release likewise.
		assert.Equal(t, exitLost, w.run("release", name, "--owner", "me").code)
		assert.Equal(t, exitLost, w.run("release", name, "--owner", rec.Owner, "--token", "7").code)
		assert.Equal(t, rec.Token, w.holder(name).Token)
		assert.Equal(t, 0, w.run("release", name, "--owner", rec.Owner, "--token", token).code)
		assert.Equal(t, exitLost, w.run("release", name, "--owner", rec.Owner).code)
		assert.Equal(t, exitFree, w.run("get", name).code)

		// Force needs no owner and says whom it evicted.
		w.hold(name, time.Minute)
		r = w.run("release", "--force", name)
		assert.Equal(t, 0, r.code)
		assert.Contains(t, r.out, "somebody else")
		r = w.run("release", "--force", name)
		assert.Equal(t, exitFree, r.code)
		w.hold(name, time.Minute)
		r = w.run("release", "--force", "--json", name)
		assert.Equal(t, "somebody else", decode(t, r.out)["owner"])

		// A fixed owner is granted again.
		assert.Equal(t, 0, w.run("acquire", "--owner", "me", "fixed").code)
		assert.Equal(t, 0, w.run("acquire", "--owner", "me", "fixed").code)
		assert.Equal(t, exitHeld, w.run("acquire", "--owner", "you", "fixed").code)
		assert.Equal(t, 0, w.run("release", "--owner", "me", "fixed").code)

		// Purge keeps what is recent.
		r = w.run("purge")
		assert.Equal(t, result{0, "purged 0\n", ""}, r)
		r = w.run("purge", "--idle", "0s", "--json")
		assert.Equal(t, result{0, "{\"purged\":2}\n", ""}, r)

		assert.Equal(t, 0, w.run("init").code, "idempotent")
	})
}

func decode(t *testing.T, line string) map[string]any {
	t.Helper()
	require.Equal(t, 1, strings.Count(line, "\n"), "one line: %q", line)
	d := json.NewDecoder(strings.NewReader(line))
	d.UseNumber()
	var m map[string]any
	require.NoError(t, d.Decode(&m), line)
	return m
}

// Only one of two processes gets a lock, though nothing but chance tells their owners apart.
func TestAcquireWaits(t *testing.T) {
	w := onSQLite(t)
	rec := w.hold("r", time.Minute)
	p := w.start("acquire", "--wait", "1m", "--json", "r")
	assert.Equal(t, exitHeld, w.run("acquire", "--wait", "300ms", "r").code)
	w.free(rec)
	require.Equal(t, 0, p.end(), p.stderr())
	assert.Equal(t, w.holder("r").Owner, decode(t, p.stdout())["owner"])
}

// ls goes through all pages, by name, and shows live locks only.
func TestLsPages(t *testing.T) {
	w := onSQLite(t)
	assert.Equal(t, result{0, "", ""}, w.run("ls"))
	assert.Equal(t, result{0, "", ""}, w.run("ls", "--json"))
	const n = 2001
	for i := range n {
		w.hold(fmt.Sprintf("lock %04d", i), time.Hour)
	}
	w.free(w.hold("free", time.Hour))
	r := w.run("ls", "--json")
	require.Equal(t, 0, r.code)
	all := lines(r.out)
	require.Len(t, all, n)
	for i, line := range all {
		require.Equal(t, fmt.Sprintf("lock %04d", i), decode(t, line+"\n")["resource"])
	}
	r = w.run("ls")
	require.Len(t, lines(r.out), n+1)
	assert.True(t, strings.HasPrefix(r.out, "RESOURCE"))
}

func TestInitPrintConnectsToNothing(t *testing.T) {
	for dsn, word := range map[string]string{
		"postgres://nowhere.invalid/db":           "timestamptz",
		"mysql://nowhere.invalid/db":              "VARBINARY",
		"sqlite:" + t.TempDir() + "/not/there.db": "WITHOUT ROWID",
	} {
		var out, errs strings.Builder
		require.Equal(t, 0, execute([]string{"--dsn", dsn, "--table", "ops.locks", "init", "--print"}, &out, &errs), errs.String())
		assert.Contains(t, out.String(), word)
		assert.Contains(t, out.String(), "locks")
	}
}

// On a server a missing table is an error that shows the way, at once and also for those who would wait.
func TestMissingTablePointsToInit(t *testing.T) {
	for _, e := range testdb.Engines(t) {
		if e.Name == "sqlite" {
			continue
		}
		t.Run(e.Name, func(t *testing.T) {
			w := emptyWorld(t, e)
			for _, args := range [][]string{{"run", "--wait", "5m", "r", "--", "true"}, {"run", "r", "--", "true"}, {"acquire", "--wait", "5m", "r"}, {"get", "r"}, {"ls"}} {
				r := w.run(args...)
				assert.Equal(t, exitUnavailable, r.code, "%q", args)
				assert.Contains(t, r.err, "locker init", "%q", args)
			}
		})
	}
}

func TestUsage(t *testing.T) {
	w := onSQLite(t)
	long := strings.Repeat("x", 256)
	for _, args := range [][]string{
		{}, {"nonsense"}, {"run"}, {"run", "r"}, {"run", "r", "--"}, {"run", "", "--", "true"}, {"run", long, "--", "true"},
		{"run", "--ttl", "0s", "r", "--", "true"}, {"run", "--ttl=-1s", "r", "--", "true"}, {"run", "--ttl", "30", "r", "--", "true"},
		{"run", "--ttl", "100000h", "r", "--", "true"}, {"run", "--wait=-1s", "r", "--", "true"}, {"run", "--min-hold=-1s", "r", "--", "true"},
		{"run", "-E", "256", "r", "--", "true"}, {"run", "-E", "-1", "r", "--", "true"}, {"run", "--nonsense", "r", "--", "true"},
		{"acquire"}, {"acquire", "--ttl", "0s", "r"}, {"acquire", "--ttl=-1s", "r"}, {"acquire", "--wait=-1s", "r"}, {"acquire", "--owner", long, "r"},
		{"renew", "r"}, {"renew", "--owner", "me", "--token=-1", "r"}, {"renew", "--owner", "me", "--ttl", "0s", "r"}, {"renew", "--token", "1", "r"},
		{"release", "r"}, {"release", "--force", "--owner", "me", "r"}, {"get"}, {"get", ""}, {"get", "a\xff"}, {"ls", "r"},
		{"purge", "--idle=-1s"}, {"--table", "a.b.c", "ls"}, {"--table", "", "ls"},
	} {
		r := w.run(args...)
		assert.Equal(t, exitUsage, r.code, "%q: %s", args, r.err)
		assert.True(t, strings.HasPrefix(r.err, "locker: "), "%q: %s", args, r.err)
		assert.Empty(t, r.out)
	}
	assert.Empty(t, w.run("ls").out, "nothing was locked")
	for _, args := range [][]string{{"--help"}, {"run", "--help"}, {"version"}} {
		r := w.run(args...)
		assert.Equal(t, 0, r.code)
		assert.NotEmpty(t, r.out)
	}
}

// A part of a second is a part of a second.
func TestTTLOfMilliseconds(t *testing.T) {
	w := onSQLite(t)
	r := w.run("acquire", "--ttl", "1500ms", "--json", "r")
	require.Equal(t, 0, r.code)
	got := decode(t, r.out)
	from, err := time.Parse(time.RFC3339, got["acquired_at"].(string))
	require.NoError(t, err)
	to, err := time.Parse(time.RFC3339, got["expires_at"].(string))
	require.NoError(t, err)
	assert.InDelta(t, 1500, to.Sub(from).Milliseconds(), 20)
}
