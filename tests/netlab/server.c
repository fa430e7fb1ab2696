// The server in the lab's pods: numbered records over TCP, both ways, and UDP echo. server [MEBIBYTES]
//
// Port 7000, IPv4 and IPv6. The first byte of a connection chooses what it does; a record is a 64-bit number,
// most significant byte first, counted from 0 in each direction.
//   E  everything comes back            P  records are sent as fast as they are taken
//   S  records are checked              D  records are checked, and 16 are sent every 5 ms
// When the peer has shut its side down, P, S and D end with four records: all ones, records received, records
// that were not the expected ones, records sent. Port 7001: UDP echo.
// MEBIBYTES of memory are filled, so that a dump has something to carry.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MAX_CONNECTIONS 600
#define BUFFER 16384

struct connection {
    int fd, n_part, n_out, ended;
    char mode;
    uint64_t received, wrong, sent;
    int64_t due_ms;
    unsigned char part[8], out[BUFFER];
};
static struct connection *connections[MAX_CONNECTIONS];
static int n_connections;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static int64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static int bound(int type, int port) {
    int one = 1, zero = 0, fd = socket(AF_INET6, type | SOCK_NONBLOCK, 0);
    struct sockaddr_in6 address = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &zero, sizeof zero);
    if (fd < 0 || bind(fd, (void *)&address, sizeof address)) fail("bind");
    return fd;
}

static void put(struct connection *c, uint64_t number) {
    number = htobe64(number);
    memcpy(c->out + c->n_out, &number, 8);
    c->n_out += 8;
}

static void check(struct connection *c, const unsigned char *data, int n) {
    for (int i = 0; i < n; i++) {
        c->part[c->n_part++] = data[i];
        if (c->n_part < 8) continue;
        uint64_t number;
        memcpy(&number, c->part, 8);
        c->n_part = 0;
        if (be64toh(number) != c->received) c->wrong++;
        c->received++;
    }
}

// Takes what has come; -1 when the connection is to be closed.
static int take(struct connection *c) {
    unsigned char data[BUFFER];
    int room = c->mode == 'E' ? BUFFER - c->n_out : BUFFER, start = 0;
    if (room == 0) return 0;
    int n = recv(c->fd, data, room, 0);
    if (n < 0) return errno == EAGAIN ? 0 : -1;
    if (n == 0) {
        c->ended = 1;
        return 0;
    }
    if (!c->mode) {
        c->mode = data[0];
        start = 1;
    }
    if (c->mode == 'E') {
        memcpy(c->out + c->n_out, data + start, n - start);
        c->n_out += n - start;
    } else {
        check(c, data + start, n - start);
    }
    return 0;
}

// Sends what is due; -1 when the connection is to be closed.
static int give(struct connection *c, int64_t now) {
    if (c->mode == 'P' && !c->ended && c->n_out == 0)
        while (c->n_out < BUFFER / 2) put(c, c->sent++);
    if (c->mode == 'D' && !c->ended && now >= c->due_ms && c->n_out < BUFFER / 2) {
        c->due_ms = now + 5;
        for (int i = 0; i < 16; i++) put(c, c->sent++);
    }
    if (c->ended == 1 && c->n_out <= BUFFER - 32) {
        if (c->mode != 'E') {
            put(c, UINT64_MAX);
            put(c, c->received);
            put(c, c->wrong);
            put(c, c->sent);
        }
        c->ended = 2;
    }
    if (c->n_out) {
        int n = send(c->fd, c->out, c->n_out, MSG_NOSIGNAL);
        if (n < 0) return errno == EAGAIN ? 0 : -1;
        memmove(c->out, c->out + n, c->n_out - n);
        c->n_out -= n;
    }
    return c->ended == 2 && c->n_out == 0 ? -1 : 0;
}

int main(int argc, char **argv) {
    size_t n_bytes = argc > 1 ? (size_t)atol(argv[1]) << 20 : 0;
    volatile uint64_t *memory = malloc(n_bytes + 8);
    uint64_t state = 88172645463325252u;
    for (size_t i = 0; i < n_bytes / 8; i++) {  // xorshift: nothing that compresses
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        memory[i] = state;
    }
    int listener = bound(SOCK_STREAM, 7000), udp = bound(SOCK_DGRAM, 7001);
    if (listen(listener, 128)) fail("listen");
    struct pollfd polled[MAX_CONNECTIONS + 2];
    for (;;) {
        int n = n_connections;
        polled[0] = (struct pollfd){listener, POLLIN, 0};
        polled[1] = (struct pollfd){udp, POLLIN, 0};
        for (int i = 0; i < n; i++) {
            struct connection *c = connections[i];
            short in = c->ended || (c->mode == 'E' && c->n_out == BUFFER) ? 0 : POLLIN;
            polled[i + 2] = (struct pollfd){c->fd, in | (c->n_out || c->mode == 'P' ? POLLOUT : 0), 0};
        }
        poll(polled, n + 2, 5);
        if (polled[0].revents && n_connections < MAX_CONNECTIONS) {
            int one = 1, fd = accept4(listener, 0, 0, SOCK_NONBLOCK);
            if (fd >= 0) {
                setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                connections[n_connections] = calloc(1, sizeof(struct connection));
                connections[n_connections++]->fd = fd;
            }
        }
        if (polled[1].revents) {
            char data[2048];
            struct sockaddr_in6 from;
            socklen_t length = sizeof from;
            int got = recvfrom(udp, data, sizeof data, 0, (void *)&from, &length);
            if (got >= 0) sendto(udp, data, got, 0, (void *)&from, length);
        }
        int64_t now = now_ms();
        for (int i = n - 1; i >= 0; i--) {
            struct connection *c = connections[i];
            int bad = polled[i + 2].revents & (POLLIN | POLLERR | POLLHUP) && !c->ended ? take(c) : 0;
            if (bad || give(c, now)) {
                close(c->fd);
                free(c);
                connections[i] = connections[--n_connections];
            }
        }
    }
}
