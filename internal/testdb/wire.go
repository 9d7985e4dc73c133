package testdb

import (
	"encoding/binary"
	"net"
	"net/url"
	"strings"
	"sync"
	"testing"

	"github.com/go-sql-driver/mysql"
)

// A Wire is a TCP proxy in front of a PostgreSQL or MySQL server. It counts round trips and breaks connections.
//
// A round trip is a request that the client waits for: a Sync or simple Query message in PostgreSQL, a command but
// COM_STMT_CLOSE, COM_STMT_SEND_LONG_DATA and COM_QUIT in MySQL. The handshake counts nothing. What the driver asks for itself
// counts: preparing a statement; pgx's ping of a connection that was idle for a second or is used for the second time.
type Wire struct {
	t      testing.TB
	target string
	mysql  bool
	listen net.Listener
	all    sync.WaitGroup

	mu     sync.Mutex
	wake   *sync.Cond
	links  map[*link]struct{} // nil: closed
	trips  int
	drop   bool
	hang   bool
	parser func() parser
}

// A link is one client's connection and the one made for it.
type link struct {
	client, server net.Conn
	parse          parser
	executes       bool // the last request of the client executes something
	cut            bool
}

// Proxy puts a Wire in front of the server that dsn (of Engine.DSN or Server.DSN) leads to. The connection must be plain: no TLS,
// no compression. It is closed at the test's end.
func Proxy(t testing.TB, dsn string) *Wire {
	t.Helper()
	w := &Wire{t: t, links: map[*link]struct{}{}}
	w.wake = sync.NewCond(&w.mu)
	if strings.Contains(dsn, "://") {
		u, err := url.Parse(dsn)
		if err != nil {
			t.Fatalf("testdb: %v", err)
		}
		w.target, w.parser = u.Host, func() parser { return &postgresParser{} }
	} else {
		c, err := mysql.ParseDSN(dsn)
		if err != nil || c.Net != "tcp" {
			t.Fatalf("testdb: no tcp DSN: %v", err)
		}
		w.target, w.mysql, w.parser = c.Addr, true, func() parser { return &mysqlParser{} }
	}
	var err error
	if w.listen, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		t.Fatalf("testdb: %v", err)
	}
	w.all.Go(w.accept)
	t.Cleanup(func() {
		w.listen.Close()
		w.mu.Lock()
		w.cut()
		w.links = nil
		w.mu.Unlock()
		w.all.Wait()
	})
	return w
}

// Addr returns the host:port that the Wire listens on.
func (w *Wire) Addr() string { return w.listen.Addr().String() }

// Through returns dsn, a DSN of the same server, changed to lead through the Wire.
func (w *Wire) Through(dsn string) string {
	w.t.Helper()
	if w.mysql {
		return editMySQL(w.t, dsn, func(c *mysql.Config) { c.Addr = w.Addr() })
	}
	u, err := url.Parse(dsn)
	if err != nil {
		w.t.Fatalf("testdb: %v", err)
	}
	u.Host = w.Addr()
	return withParams(u.String(), "sslmode=disable")
}

// RoundTrips returns the number of round trips since the start or the last Reset.
func (w *Wire) RoundTrips() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.trips
}

// Reset sets the number of round trips to zero.
func (w *Wire) Reset() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.trips = 0
}

// Cut closes all connections, now, with all that is under way on them. New ones can be made.
func (w *Wire) Cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cut()
}

// DropReplies lets the server get and do everything, but the first answer of a connection to a request that executes something is
// thrown away and the connection closed. Handshakes and the preparing of statements pass.
func (w *Wire) DropReplies(on bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.drop = on
}

// Hang makes a black hole of the network: connections stay, nothing gets through either way, not even that the other side has
// closed. Hang(false) heals it, and what was sent meanwhile arrives late, unless Cut came first. (After an ended context pgx sends
// a cancel request on another connection. It arrives late as well, before the statement or after it.)
func (w *Wire) Hang(on bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.hang = on
	w.wake.Broadcast()
}

func (w *Wire) accept() {
	for {
		c, err := w.listen.Accept()
		if err != nil {
			return
		}
		l := &link{client: c, parse: w.parser()}
		w.mu.Lock()
		if w.links == nil {
			c.Close()
		} else {
			w.links[l] = struct{}{}
			w.all.Go(func() { w.serve(l) })
		}
		w.mu.Unlock()
	}
}

func (w *Wire) serve(l *link) {
	if !w.pass(l, nil) {
		return
	}
	server, err := net.Dial("tcp", w.target)
	w.mu.Lock()
	if err != nil || l.cut {
		w.close(l)
		if err == nil {
			server.Close()
		}
		w.mu.Unlock()
		return
	}
	l.server = server
	w.mu.Unlock()
	w.all.Go(func() {
		w.pump(l, l.server, l.client, func(b []byte) bool {
			requests, executes := l.parse.feed(b)
			if requests > 0 {
				w.trips += requests
				l.executes = executes
			}
			return true
		})
	})
	w.pump(l, l.client, l.server, func([]byte) bool { return !w.drop || !l.executes })
}

// pump copies until one side ends or look, which is called with w.mu held, refuses.
func (w *Wire) pump(l *link, to, from net.Conn, look func([]byte) bool) {
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			if !w.pass(l, func() bool { return look(buf[:n]) }) {
				break
			}
			if _, err := to.Write(buf[:n]); err != nil {
				break
			}
		}
		if err != nil {
			break
		}
	}
	w.pass(l, func() bool { return false })
}

// pass waits out a black hole and says whether the link goes on, which look may refuse.
func (w *Wire) pass(l *link, look func() bool) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.hang && !l.cut {
		w.wake.Wait()
	}
	if !l.cut && look != nil && !look() {
		w.close(l)
	}
	return !l.cut
}

func (w *Wire) cut() {
	for l := range w.links {
		w.close(l)
	}
	w.wake.Broadcast()
}

func (w *Wire) close(l *link) {
	l.cut = true
	delete(w.links, l)
	l.client.Close()
	if l.server != nil {
		l.server.Close()
	}
}

// A parser follows what one client sends, in pieces of any size: how many requests that need an answer ended or began in b, and
// whether the last of them executes something.
type parser interface {
	feed(b []byte) (requests int, executes bool)
}

// take moves bytes from b to head until it has n of them.
func take(head, b []byte, n int) (h, rest []byte, full bool) {
	k := min(n-len(head), len(b))
	return append(head, b[:k]...), b[k:], len(head)+k == n
}

type postgresParser struct {
	head    []byte
	skip    int // rest of the message
	typed   bool
	execute bool // since the last Sync
}

func (p *postgresParser) feed(b []byte) (requests int, executes bool) {
	for len(b) > 0 {
		if p.skip > 0 {
			n := min(p.skip, len(b))
			p.skip -= n
			b = b[n:]
			continue
		}
		var full bool
		if !p.typed { // the start: length, code, …
			if p.head, b, full = take(p.head, b, 8); full {
				p.skip = int(binary.BigEndian.Uint32(p.head)) - 8
				p.typed = p.head[4] == 0 && p.head[5] == 3 // protocol 3: not the question for TLS or a cancel
				p.head = p.head[:0]
			}
			continue
		}
		if p.head, b, full = take(p.head, b, 5); !full {
			break
		}
		p.skip = int(binary.BigEndian.Uint32(p.head[1:])) - 4
		switch p.head[0] {
		case 'E':
			p.execute = true
		case 'S':
			requests, executes, p.execute = requests+1, p.execute, false
		case 'Q':
			requests, executes = requests+1, true
		}
		p.head = p.head[:0]
	}
	return requests, executes
}

type mysqlParser struct {
	head []byte
	skip int
}

func (p *mysqlParser) feed(b []byte) (requests int, executes bool) {
	const quit, prepare, sendLongData, stmtClose = 0x01, 0x16, 0x18, 0x19
	for len(b) > 0 {
		if p.skip > 0 {
			n := min(p.skip, len(b))
			p.skip -= n
			b = b[n:]
			continue
		}
		size := 4 // length, sequence id
		if len(p.head) == 4 {
			size = 5 // and the command
		}
		var full bool
		if p.head, b, full = take(p.head, b, size); !full {
			break
		}
		length := int(p.head[0]) | int(p.head[1])<<8 | int(p.head[2])<<16
		if size == 4 {
			if p.head[3] == 0 && length > 0 {
				continue
			}
		} else {
			length--
			switch p.head[4] {
			case quit, sendLongData, stmtClose:
			default:
				requests, executes = requests+1, p.head[4] != prepare
			}
		}
		p.skip = length
		p.head = p.head[:0]
	}
	return requests, executes
}
