"""A Java virtual machine: threads, locks, a scheduled task, memory that its collector moves."""

import sys

sys.path.insert(0, "/workloads")
import glob
import subprocess

from common import Absent, check, eventually, run, same

PROGRAM = """
import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.atomic.*;

public class Main {
    static byte[] garbage;
    public static void main(String[] words) throws Exception {
        AtomicLong ticks = new AtomicLong();
        var pool = Executors.newScheduledThreadPool(2);
        pool.scheduleAtFixedRate(ticks::incrementAndGet, 0, 10, TimeUnit.MILLISECONDS);
        Map<Integer, String> map = new ConcurrentHashMap<>();
        for (int i = 0; i < 100000; i++) map.put(i, "value " + i);
        SynchronousQueue<String> queue = new SynchronousQueue<>();
        new Thread(() -> {
            try { while (true) { queue.put("from a thread"); } } catch (Exception e) { }
        }).start();
        Scanner in = new Scanner(System.in);
        System.out.println("up");
        while (in.hasNextLine()) {
            String line = in.nextLine();
            if (line.equals("ticks")) System.out.println(ticks.get());
            else if (line.equals("map")) System.out.println(map.size() + " " + map.get(777));
            else if (line.equals("queue")) System.out.println(queue.take());
            else if (line.equals("collect")) {
                for (int i = 0; i < 300; i++) garbage = new byte[1 << 20];
                System.gc();
                System.out.println("collected");
            }
        }
    }
}
"""


def setup():
    found = glob.glob("/usr/lib/jvm/*/bin/java")
    if not found:
        raise Absent("no Java")
    with open("/tmp/Main.java", "w") as file:
        file.write(PROGRAM)
    options = ["-Xmx128m", "-XX:-UsePerfData", "-Xshare:auto"]
    # The headless runtime has no compiler; Eclipse's is a single jar.
    compiler = ["-cp", "/usr/share/java/ecj.jar", "org.eclipse.jdt.internal.compiler.batch.Main"]
    made = subprocess.run(
        [found[0], *options, *compiler, "-11", "-nowarn", "-d", "/tmp", "/tmp/Main.java"],
        capture_output=True,
        text=True,
        check=False,
    )
    check(made.returncode == 0, f"the compiler: {made.stdout[-200:]}{made.stderr[-200:]}")
    argv = [found[0], *options, "-cp", "/tmp", "Main"]
    machine = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    line = machine.stdout.readline()
    if line != "up\n":
        machine.wait(10)
        raise AssertionError(f"java did not start: {machine.stderr.read()[-200:]!r}")

    def ask(word):
        machine.stdin.write(word + "\n")
        machine.stdin.flush()
        return machine.stdout.readline().strip()

    ticks = int(ask("ticks"))

    def verify():
        check(machine.poll() is None, "java ended")
        eventually(lambda: int(ask("ticks")) > ticks + 5, "its scheduled task goes on")
        same(ask("map"), "100000 value 777", "its map")
        same(ask("collect"), "collected", "its garbage collector")
        same(ask("queue"), "from a thread", "its threads")
        same(ask("map"), "100000 value 777", "its map after a collection")

    return verify


run(setup)
