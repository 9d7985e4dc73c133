package lockertest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/locker-go/locker"
)

// badNames are no names. As resource and as owner, in every verb.
var badNames = []string{
	"",
	strings.Repeat("x", 256),
	strings.Repeat("é", 128), // 256 bytes
	"a\x00b",
	"\x00",
	"a\xff",
	"a\xc3",         // half of an é
	"\xed\xa0\x80",  // half of a UTF-16 pair
	"\xc0\xafab",    // a slash in two bytes
	"\xf4\x90\x80z", // beyond Unicode
}

// oddNames returns different names that something on the way to the store, or in it, may take for the same or for something else.
// Those that are easily confused stand side by side. id is made of digits.
func oddNames(id string) []string {
	fill := func(n int, end string) string { return id + strings.Repeat("x", n-len(id)-len(end)) + end }
	return []string{
		// Numbers: compared as such they are the same.
		id, "0" + id, "00" + id, id + ".0", id + ".", "+" + id, "-" + id, id + "e0", "0x" + id,
		// Spaces and what is as good as invisible.
		id + " ", id + "  ", " " + id, id + "\t", id + "\n", "\n" + id, id + "\r\n", id + "\u00a0", id + "\u200b", id + "\u00ad", "\ufeff" + id,
		id + "\u200f", "\u202e" + id, id + "\x01", id + "\x1a", id + "\x7f",
		// Case and accents: folded, composed, decomposed, compatible.
		id + "a", id + "A", id + "á", id + "a\u0301", id + "à", id + "å", id + "Å", id + "\u212b", id + "ａ", id + "ª",
		id + "ß", id + "ss", id + "ẞ", id + "SS", id + "ſs",
		id + "i", id + "I", id + "ı", id + "İ",
		id + "ﬁ", id + "fi", id + "σ", id + "ς",
		// Beyond 16 bits; some collations take these for one.
		id + "🔒", id + "🔓", id + "👍", id + "👍🏽", id + "𝐚", id + "\U0010ffff", id + "\ufffd", id + "?", id + "??",
		// Text in SQL, patterns and parameters.
		id + "'", id + "''", id + `"`, id + "`", id + `\`, id + `\\`, id + `\'`, id + `\n`, id + "'; DROP TABLE distributed_locks; --", id + "' OR '1'='1",
		id + "%", id + "_", "%" + id, "_" + id, id + "*", id + "[a]", id + "$1", "$" + id, ":" + id, "@" + id, "::" + id, id + "/*", id + "--", id + ";",
		// JSON and formats.
		id + `\u0061`, id + "{}", id + "[", id + "</script>", id + "%s", id + "%!d", id + "&amp;", id + "\u2028",
		// Paths and URLs.
		"../" + id, "./" + id, "/" + id, "//" + id, id + "/", id + "/..", id + "/../x", id + "//x", id + "/x", id + "%2F", id + "%2f", id + "%2Fx", id + "+", id + "%20",
		id + "#x", id + "?x=1", id + "&x=1", id + ";x=1", "http://" + id, "C:" + id, `..\` + id,
		// Nothing, spelled out.
		id + "NULL", id + "null", id + "nil", id + "undefined",
		// Lengths: cut or padded they are the same.
		fill(254, "y"), fill(255, "y"), fill(255, "z"), fill(255, "é"), fill(255, "🔒"),
	}
}

// bareNames cannot be made unique without becoming other names.
var bareNames = []string{
	"7", "07", "7.0", "0", "-0", "NULL", "null", "nil", "true", "false", "default", " ", "  ", "\n", "\t", "%", "_", "*", "'", `"`, `\`, "/", "//", ".", "..", "../", "../..", "?", "#", "&",
	"=", "a", "A", "á", "a\u0301", "🔒", "-", "--", "-1", ":resource", "$1", "?1", "{}", "[]", "\u200f", "\ufeff",
}

func digits() string { return fmt.Sprintf("7%018d", rand.Int64N(1e18)) }

func namesResource(c *check) {
	names := oddNames(digits())
	recs := make([]locker.Record, len(names))
	for i, name := range names {
		rec, err := c.Acquire(c.ctx, name, fmt.Sprintf("owner-%d", i), c.long)
		if err != nil {
			c.Fatalf("Acquire(%q): %v, want a grant: no other name is this one", name, err)
		}
		c.record(rec, name, fmt.Sprintf("owner-%d", i), c.long)
		recs[i] = rec
	}
	for _, rec := range recs {
		got := c.get(c, rec.Resource)
		c.record(got, rec.Resource, rec.Owner, c.long)
		if got.Token != rec.Token {
			c.Errorf("Get(%q) returned token %d, want %d", rec.Resource, got.Token, rec.Token)
		}
	}
	// Renewals and releases reach the lock they name, and no other.
	for i, rec := range recs {
		if i%2 == 0 {
			c.release(c, c.renew(c, rec, c.long))
		}
	}
	for i, rec := range recs {
		if i%2 == 0 {
			c.free(c, rec.Resource)
		} else {
			c.unchanged(c, rec)
			_, err := c.Acquire(c.ctx, rec.Resource, "another", c.long)
			c.held(err, rec, "acquire of %q, which is held", rec.Resource)
		}
	}
}

func namesOwner(c *check) {
	names := append(oddNames(digits()), bareNames...)
	resource := c.name("a")
	for i, name := range names {
		rec, err := c.Acquire(c.ctx, resource, name, c.long)
		if err != nil {
			c.Fatalf("Acquire for owner %q: %v", name, err)
		}
		c.record(rec, resource, name, c.long)
		c.unchanged(c, rec)
		// The others are others, above all those that are much the same.
		for near := i - 5; near <= i+5; near++ {
			if near == i || near < 0 || near >= len(names) {
				continue
			}
			_, err := c.Acquire(c.ctx, resource, names[near], c.long)
			c.held(err, rec, "acquire for owner %q", names[near])
		}
		other := rec
		other.Owner = names[(i+1)%len(names)]
		c.want(c.Release(c.ctx, other), locker.ErrNotOwner, "release by %q of the lock of %q", other.Owner, name)
		_, err = c.Renew(c.ctx, other, c.long)
		c.want(err, locker.ErrNotOwner, "renewal by %q of the lock of %q", other.Owner, name)
		c.unchanged(c, rec)
		c.release(c, c.renew(c, rec, c.long))
	}
}

func namesBare(c *check) {
	// Other runs may be here with the same names: one at a time. What a run that was killed has left ends before its guard does
	// (or, where there is one ttl only, as good as with it).
	guardTTL, ttl := c.ttl(time.Minute), c.ttl(30*time.Second)
	owner := digits()
	var guard locker.Record
	for begin := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		var err error
		guard, err = c.Acquire(c.ctx, "lockertest names-bare", owner, guardTTL)
		if err == nil {
			break
		}
		c.want(err, locker.ErrHeld, "acquire of what guards the names")
		if c.hasFailed() || time.Since(begin) > 3*c.patience {
			c.Fatalf("the names are in use: %v", err)
		}
	}
	var recs []locker.Record
	for _, name := range bareNames {
		recs = append(recs, c.acquire(c, name, owner, ttl)) // if it is taken for one of those before, that one is lost
	}
	for _, rec := range recs {
		got := c.get(c, rec.Resource)
		c.record(got, rec.Resource, owner, ttl)
		if got.Token != rec.Token {
			c.Errorf("Get(%q): token %d, want that of the grant, %d", rec.Resource, got.Token, rec.Token)
		}
	}
	for _, rec := range recs {
		c.release(c, rec)
	}
	c.release(c, guard)
}

func namesRejected(c *check) {
	rec := c.acquire(c, c.name("held"), "owner-1", c.long)
	for _, name := range badNames {
		for _, ctx := range []context.Context{c.ctx, cancelled(c.ctx)} {
			_, err := c.Acquire(ctx, name, "owner-1", c.long)
			c.invalid(err, "resource", "Acquire(%.40q)", name)
			_, err = c.Acquire(ctx, rec.Resource, name, c.long)
			c.invalid(err, "owner", "Acquire for owner %.40q", name)
			_, err = c.Get(ctx, name)
			c.invalid(err, "resource", "Get(%.40q)", name)

			bad := locker.Record{Resource: name, Owner: "owner-1", Token: rec.Token}
			_, err = c.Renew(ctx, bad, c.long)
			c.invalid(err, "resource", "Renew(%.40q)", name)
			c.invalid(c.Release(ctx, bad), "resource", "Release(%.40q)", name)

			bad = locker.Record{Resource: rec.Resource, Owner: name, Token: rec.Token}
			_, err = c.Renew(ctx, bad, c.long)
			c.invalid(err, "owner", "Renew by owner %.40q", name)
			c.invalid(c.Release(ctx, bad), "owner", "Release by owner %.40q", name)

			bad = locker.Record{Resource: rec.Resource, Owner: rec.Owner, Token: -1}
			_, err = c.Renew(ctx, bad, c.long)
			c.invalid(err, "token", "Renew of token -1")
			c.invalid(c.Release(ctx, bad), "token", "Release of token -1")
		}
	}
	c.unchanged(c, rec)
	// The longest and the shortest there may be.
	for _, owner := range []string{"x", strings.Repeat("x", 255), strings.Repeat("é", 127), strings.Repeat("🔒", 63)} {
		rec := c.acquire(c, c.name(owner[:min(len(owner), 100)]), owner, c.long)
		c.unchanged(c, rec)
	}
}
