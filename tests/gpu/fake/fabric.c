/* See fabric.h. */
#define _GNU_SOURCE
#include "fabric.h"

#include <dirent.h>
#include <stddef.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

_Static_assert(sizeof(struct page) <= PAGE_BYTES, "the page has grown");

static void nap(unsigned ms) {
    struct timespec wait = {ms / 1000, (ms % 1000) * 1000000L};
    nanosleep(&wait, NULL);
}

static unsigned long long now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000ULL + now.tv_nsec / 1000000;
}

static FILE *open_file(const char *name, const char *mode) {
    const char *directory = getenv("FAKE_CUDA_DIR");
    char path[4096];
    if (!directory)
        return NULL;
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return fopen(path, mode);
}

int fabric_devices(struct device *devices) {
    FILE *file = open_file("devices", "r");
    int n = 0;
    char line[512];
    if (!file)
        return 0;
    while (n < MAX_DEVICES && fgets(line, sizeof line, file)) {
        struct device *d = &devices[n];
        if (sscanf(line, "%47[^|]|%63[^|]|%llu|%u|%u|%u", d->uuid, d->model, &d->bytes, &d->minor, &d->mig,
                   &d->mps) == 6)
            n++;
    }
    fclose(file);
    return n;
}

int fabric_driver(char *text, unsigned size) {
    FILE *file = open_file("driver", "r");
    if (!file || !fgets(text, size, file)) {
        if (file)
            fclose(file);
        return 0;
    }
    fclose(file);
    text[strcspn(text, "\n")] = 0;
    return 1;
}

/* Where the page lies in a process's memory, 0 if it has none. */
static off_t find_page(pid_t pid) {
    char path[64], line[4352];
    off_t found = 0;
    snprintf(path, sizeof path, "/proc/%d/maps", pid);
    FILE *file = fopen(path, "r");
    if (!file)
        return 0;
    while (!found && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        size_t length = strlen(line);
        if (length > 9 && !strcmp(line + length - 9, "/gpu-page"))
            found = strtoull(line, NULL, 16);
    }
    fclose(file);
    return found;
}

static int open_memory(pid_t pid, int flags) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/mem", pid);
    return open(path, flags | O_CLOEXEC);
}

static int read_page(pid_t pid, off_t at, struct page *page) {
    char id[33] = "";
    FILE *file = open_file("id", "r");
    if (!file)
        return 0;
    if (!fgets(id, sizeof id, file))
        id[0] = 0;
    fclose(file);
    int memory = at ? open_memory(pid, O_RDONLY) : -1;
    if (memory < 0)
        return 0;
    int whole = pread(memory, page, sizeof *page, at) == sizeof *page;
    close(memory);
    return whole && !memcmp(page->magic, "FAKEGPU1", 8) && !memcmp(page->id, id, 32);
}

static int write_at(pid_t pid, off_t at, const void *data, size_t size) {
    int memory = open_memory(pid, O_RDWR);
    if (memory < 0)
        return 0;
    int whole = pwrite(memory, data, size, at) == (ssize_t)size;
    close(memory);
    return whole;
}

int fabric_processes(pid_t *pids, struct page *pages, int limit) {
    DIR *proc = opendir("/proc");
    int n = 0;
    struct dirent *entry;
    while (proc && n < limit && (entry = readdir(proc))) {
        pid_t pid = atoi(entry->d_name);
        if (pid > 0 && read_page(pid, find_page(pid), &pages[n]))
            pids[n++] = pid;
    }
    if (proc)
        closedir(proc);
    return n;
}

static int injected(pid_t pid, const char *action) {
    FILE *file = open_file("inject", "r");
    char line[256], who[32], what[32], self[32];
    unsigned ms, result;
    if (!file)
        return SUCCESS;
    snprintf(self, sizeof self, "%d", pid);
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "%31s %31s %u %u", who, what, &ms, &result) == 4 && !strcmp(what, action) &&
            (who[0] == '*' || !strcmp(who, self))) {
            fclose(file);
            nap(ms);
            return result;
        }
    }
    fclose(file);
    return SUCCESS;
}

static void note(pid_t pid, const char *action, int result) {
    FILE *file = open_file("calls", "a");
    if (!file)
        return;
    fprintf(file, "%d %s %d\n", pid, action, result);
    fclose(file);
}

static int wanted_locked(pid_t pid) {
    char name[64];
    snprintf(name, sizeof name, "lock-%d", pid);
    FILE *file = open_file(name, "r");
    if (file)
        fclose(file);
    return file != NULL;
}

/* Wait until a lock is wanted for everybody in `together`, as for the ranks of one job. */
static int wait_together(pid_t pid, unsigned long long deadline) {
    char name[64];
    snprintf(name, sizeof name, "lock-%d", pid);
    FILE *file = open_file(name, "w");
    if (file)
        fclose(file);
    for (;;) {
        int missing = 0, named = 0, other;
        file = open_file("together", "r");
        if (!file)
            return SUCCESS;
        while (fscanf(file, "%d", &other) == 1) {
            named |= other == pid;
            missing |= !wanted_locked(other);
        }
        fclose(file);
        if (!named || !missing)
            return SUCCESS;
        if (now_ms() > deadline)
            return NOT_READY;
        nap(5);
    }
}

/* Wait until the thread inside the process has done what somebody else, who may be dead, asked of it. */
static void wait_idle(pid_t pid, off_t at, unsigned long long deadline) {
    struct page page;
    while (read_page(pid, at, &page) && page.request != NOTHING && now_ms() <= deadline)
        nap(1);
}

/* Ask the thread inside the process, and wait for its answer. */
static int ask(pid_t pid, off_t at, uint32_t request, unsigned long long deadline) {
    uint32_t pending = PENDING;
    struct page page;
    off_t answer = at + offsetof(struct page, answer), wish = at + offsetof(struct page, request);
    if (!write_at(pid, answer, &pending, sizeof pending) || !write_at(pid, wish, &request, sizeof request))
        return INVALID_VALUE;
    for (;;) {
        if (!read_page(pid, at, &page))
            return INVALID_VALUE;
        if (page.answer != PENDING)
            return page.answer;
        if (now_ms() > deadline) {
            uint32_t none = NOTHING;
            write_at(pid, wish, &none, sizeof none);
            return NOT_READY;
        }
        nap(1);
    }
}

static int act(pid_t pid, const char *name, uint32_t from, uint32_t request, unsigned timeout_ms) {
    struct page page;
    off_t at = find_page(pid);
    unsigned long long deadline = timeout_ms ? now_ms() + timeout_ms : ~0ULL;
    wait_idle(pid, at, deadline);
    if (!read_page(pid, at, &page))
        return INVALID_VALUE;
    if (page.state != from)
        return ILLEGAL_STATE;
    int result = injected(pid, name);
    if (now_ms() > deadline)
        result = NOT_READY;
    if (result == SUCCESS && request == LOCK)
        result = wait_together(pid, deadline);
    if (result == SUCCESS)
        result = ask(pid, at, request, deadline);
    note(pid, name, result);
    return result;
}

int process_state(pid_t pid, uint32_t *state) {
    struct page page;
    if (!read_page(pid, find_page(pid), &page))
        return INVALID_VALUE;
    *state = page.state;
    return injected(pid, "state");
}

int process_lock(pid_t pid, unsigned timeout_ms) { return act(pid, "lock", RUNNING, LOCK, timeout_ms); }

int process_checkpoint(pid_t pid) { return act(pid, "checkpoint", LOCKED, CHECKPOINT, 0); }

int process_unlock(pid_t pid) {
    char path[4096];
    int result = act(pid, "unlock", LOCKED, UNLOCK, 0);
    if (result == SUCCESS) {
        snprintf(path, sizeof path, "%s/lock-%d", getenv("FAKE_CUDA_DIR"), pid);
        unlink(path);
    }
    return result;
}

static const struct device *device_of(const struct device *devices, int n, const char *uuid) {
    for (int i = 0; i < n; i++)
        if (!strcmp(devices[i].uuid, uuid))
            return &devices[i];
    return NULL;
}

/* Bytes that running processes hold on a device. */
static unsigned long long held_bytes(const char *uuid) {
    pid_t pids[256];
    static struct page pages[256];
    unsigned long long bytes = 0;
    int n = fabric_processes(pids, pages, 256);
    for (int i = 0; i < n; i++)
        for (unsigned d = 0; pages[i].state < CHECKPOINTED && d < pages[i].n_used; d++)
            if (!strcmp(pages[i].uuids[d], uuid))
                bytes += (unsigned long long)pages[i].mebibytes << 20;
    return bytes;
}

int process_restore(pid_t pid, const struct pair *pairs, unsigned n_pairs) {
    struct page page;
    struct device devices[MAX_DEVICES];
    int n = fabric_devices(devices);
    off_t at = find_page(pid);
    if (!read_page(pid, at, &page))
        return INVALID_VALUE;
    if (page.state != CHECKPOINTED)
        return ILLEGAL_STATE;
    for (unsigned d = 0; d < page.n_devices; d++) {
        const char *to = n_pairs ? NULL : page.uuids[d];
        for (unsigned i = 0; i < n_pairs; i++)
            if (!strcmp(pairs[i].from, page.uuids[d]))
                to = pairs[i].to;
        const struct device *device = to ? device_of(devices, n, to) : NULL;
        if (!device)
            return INVALID_VALUE; /* a map must name every GPU that the process sees, and each must be there */
        if (d < page.n_used && held_bytes(to) + ((unsigned long long)page.mebibytes << 20) > device->bytes)
            return OUT_OF_MEMORY;
        memset(page.wanted[d], 0, UUID_TEXT);
        strncpy(page.wanted[d], to, UUID_TEXT - 1);
    }
    if (!write_at(pid, at + offsetof(struct page, wanted), page.wanted, sizeof page.wanted))
        return INVALID_VALUE;
    return act(pid, "restore", CHECKPOINTED, RESTORE, 0);
}
