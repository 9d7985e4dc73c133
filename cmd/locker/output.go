package main

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/locker-go/locker"
)

// jsonFlag is embedded by every command with output.
type jsonFlag struct {
	JSON bool `name:"json" help:"Print JSON."`
}

// lockJSON is a lock as JSON, the same in all commands.
type lockJSON struct {
	Resource    string `json:"resource"`
	Owner       string `json:"owner"`
	Token       int64  `json:"token"`
	AcquiredAt  string `json:"acquired_at"`
	ExpiresAt   string `json:"expires_at"`
	RemainingMS int64  `json:"remaining_ms"`
}

func asJSON(r locker.Record) lockJSON {
	return lockJSON{r.Resource, r.Owner, r.Token, instant(r.AcquiredAt), instant(r.ExpiresAt), r.Remaining.Milliseconds()}
}

// instant is RFC 3339 with microseconds in UTC, always as long.
func instant(t time.Time) string { return t.UTC().Format("2006-01-02T15:04:05.000000Z07:00") }

// printJSON prints v on a line.
func (a *app) printJSON(v any) error {
	e := json.NewEncoder(a.stdout)
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// printLock prints one lock.
func (a *app) printLock(r locker.Record, asked jsonFlag) error {
	if asked.JSON {
		return a.printJSON(asJSON(r))
	}
	w := tabwriter.NewWriter(a.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "resource\t%s\n", plain(r.Resource))
	fmt.Fprintf(w, "owner\t%s\n", plain(r.Owner))
	fmt.Fprintf(w, "token\t%d\n", r.Token)
	fmt.Fprintf(w, "acquired\t%s\n", instant(r.AcquiredAt))
	fmt.Fprintf(w, "expires\t%s (in %v)\n", instant(r.ExpiresAt), r.Remaining.Round(time.Millisecond))
	return w.Flush()
}

// printLocks prints one page, with a header if it is the first.
func (a *app) printLocks(page []locker.Record, first bool, asked jsonFlag) error {
	if asked.JSON {
		for _, r := range page {
			if err := a.printJSON(asJSON(r)); err != nil {
				return err
			}
		}
		return nil
	}
	if len(page) == 0 {
		return nil
	}
	w := tabwriter.NewWriter(a.stdout, 0, 0, 2, ' ', 0)
	if first {
		fmt.Fprintln(w, "RESOURCE\tOWNER\tTOKEN\tACQUIRED\tEXPIRES\tREMAINING")
	}
	for _, r := range page {
		fmt.Fprintf(w, "%s\t%s\t%d\t%s\t%s\t%v\n", plain(r.Resource), plain(r.Owner), r.Token,
			instant(r.AcquiredAt), instant(r.ExpiresAt), r.Remaining.Round(time.Millisecond))
	}
	return w.Flush()
}

// printExports prints a grant as variables that a shell can eval.
func (a *app) printExports(r locker.Record, ttl time.Duration) error {
	_, err := fmt.Fprintf(a.stdout, "export LOCKER_RESOURCE=%s\nexport LOCKER_OWNER=%s\nexport LOCKER_TOKEN=%d\nexport LOCKER_TTL=%v\n",
		shellQuote(r.Resource), shellQuote(r.Owner), r.Token, ttl)
	return err
}

func shellQuote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// plain is s as it is, or quoted if it could be taken for something else: names are any UTF-8, line ends and terminal codes too.
func plain(s string) string {
	odd := func(r rune) bool { return !unicode.IsPrint(r) || r == '"' || r == '\\' }
	if strings.ContainsFunc(s, odd) || strings.TrimSpace(s) != s {
		return strconv.Quote(s)
	}
	return s
}
