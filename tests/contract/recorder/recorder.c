/* A fake runtime that writes down how it was started, exactly, into <its own path>.record, and exits with 42.
 *
 * C, because an interpreter changes signal dispositions and environment before its first line runs, and a
 * shell both. One fact a line, except the raw blocks, which come with their length. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static FILE *out;

static void block(const char *name, const char *path)
{
	static char buffer[1 << 22];
	int descriptor = open(path, O_RDONLY);
	size_t length = 0;
	ssize_t n;

	while ((n = read(descriptor, buffer + length, sizeof(buffer) - length)) > 0)
		length += n;
	close(descriptor);
	fprintf(out, "%s %zu ", name, length);
	fwrite(buffer, 1, length, out);
	fputc('\n', out);
}

static void descriptors(void)
{
	char path[64], target[4096];

	for (int number = 0; number < 1024; number++) {
		int flags = fcntl(number, F_GETFD);
		if (flags < 0 || number == fileno(out))
			continue;
		snprintf(path, sizeof(path), "/proc/self/fd/%d", number);
		ssize_t n = readlink(path, target, sizeof(target) - 1);
		target[n < 0 ? 0 : n] = 0;
		fprintf(out, "fd %d flags %d status %d offset %lld %s\n", number, flags, fcntl(number, F_GETFL),
			(long long)lseek(number, 0, SEEK_CUR), target);
	}
}

static void status(void)
{
	static const char *const wanted[] = { "Umask:", "PPid:", "NSpgid:", "NSsid:", "SigPnd:", "ShdPnd:", "SigBlk:",
		"SigIgn:", "SigCgt:", "CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:", "NoNewPrivs:", "Uid:",
		"Gid:", "Groups:", "Threads:" };
	char line[4096];
	FILE *in = fopen("/proc/self/status", "re");

	while (fgets(line, sizeof(line), in))
		for (size_t i = 0; i < sizeof(wanted) / sizeof(*wanted); i++)
			if (!strncmp(line, wanted[i], strlen(wanted[i])))
				fputs(line, out);
	fclose(in);
}

int main(int argc, char **argv)
{
	char self[4096], path[4200], directory[4096];
	struct rlimit limit;
	int number = 0;

	ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
	self[n] = 0;
	snprintf(path, sizeof(path), "%s.record", self);
	/* Number 1000 and more: the low ones are the caller's. */
	int low = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
	int high = fcntl(low, F_DUPFD_CLOEXEC, 1000);
	close(low);
	out = fdopen(high, "w");

	block("cmdline", "/proc/self/cmdline");
	block("environ", "/proc/self/environ");
	fprintf(out, "cwd %s\n", getcwd(directory, sizeof(directory)) ? directory : "gone");
	status();
	descriptors();
	for (int resource = 0; resource < RLIM_NLIMITS; resource++) {
		getrlimit(resource, &limit);
		fprintf(out, "limit %d %llu %llu\n", resource, (unsigned long long)limit.rlim_cur,
			(unsigned long long)limit.rlim_max);
	}
	fprintf(out, "nice %d\n", getpriority(PRIO_PROCESS, 0));
	fprintf(out, "personality %x\n", personality(0xffffffff));
	prctl(PR_GET_PDEATHSIG, &number);
	fprintf(out, "parent death signal %d\n", number);
	prctl(PR_GET_CHILD_SUBREAPER, &number);
	fprintf(out, "subreaper %d\n", number);
	fprintf(out, "timer slack %d\n", prctl(PR_GET_TIMERSLACK));
	fprintf(out, "pid %d\n", getpid());
	fclose(out);
	return 42;
}
