//! The XDP program as a component program of libxdp's dispatcher, beside programs that xdp-loader
//! loads (Debian's xdp-tools).

use std::{
    fs,
    net::UdpSocket,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use aya::maps::{Map, MapData, PerCpuArray};
use nix::sched::{CloneFlags, setns};
use proxy_userspace::{
    dataplane::ebpf::{Ebpf, LinkAttachment},
    kernel::bpf::LogLevel,
    model::{XdpMode, XdpPolicy},
};
use shunt_tests::{
    deadline::Deadline,
    process::{CommandOutput, run_with_timeout},
};

use crate::bench::{Bench, WITHIN, run};

const LINK: &str = "v0";
/// Where libxdp pins component programs.
const PINS: &str = "/sys/fs/bpf/xdp";
/// Folders in which distributions have libxdp's programs.
const FOLDERS: [&str; 4] =
    ["/usr/lib/x86_64-linux-gnu/bpf", "/usr/lib/aarch64-linux-gnu/bpf", "/usr/lib64/bpf", "/usr/lib/bpf"];
/// A filter that passes all packets and counts them.
const FILTER: &str = "xdpfilt_alw_all.o";
const FILTERS: &str = "xdpfilt_alw_all";
const SHUNT: &str = "shunt_xdp_ext";
const XDP_PASS: u32 = 2;

/// Programs of others on the link, until it is dropped.
struct Others {
    bench: Bench,
    filter: PathBuf,
    /// Directories where their maps are pinned.
    maps: Vec<PathBuf>,
}

impl Others {
    /// Creates the links. Returns `None`, with a message, if this machine cannot run dispatchers.
    fn new() -> Option<Self> {
        let mut folders = FOLDERS.iter().map(|folder| Path::new(folder).join(FILTER));
        let Some(filter) = folders.find(|filter| filter.exists()) else {
            eprintln!("left out: {FILTER} is missing; `cargo xtask setup` installs xdp-tools");
            return None;
        };
        let bench = Bench::new(LinkAttachment::Probe);
        bench.add_veth(LINK, "v1");
        run("ip", &["address", "add", "192.0.2.1/24", "dev", LINK]);
        run("ip", &["address", "add", "198.51.100.1/24", "brd", "+", "dev", "v1"]);
        let mut this = Self { bench, filter, maps: Vec::new() };
        let loaded = this.load(10, 1);
        // The policy of a machine may deny programs of this type to root.
        if loaded.stderr.contains("Operation not permitted")
            || loaded.stdout.contains("Operation not permitted")
        {
            eprintln!(
                "left out: this machine denies programs of type BPF_PROG_TYPE_EXT; `cargo xtask vm` runs it"
            );
            return None;
        }
        assert_eq!(names(), [FILTERS], "xdp-loader uses a dispatcher: {}", loaded.stderr);
        Some(this)
    }

    /// Loads filters with a priority, which share a count.
    fn load(&mut self, priority: u32, number: usize) -> CommandOutput {
        let pins = &self.bench.settings.pin_dir;
        let maps = pins.with_extension(format!("{priority}")).display().to_string().replace('.', "-");
        fs::create_dir(&maps).expect("bpffs");
        let (filter, priority) = (self.filter.display().to_string(), priority.to_string());
        let mut arguments = vec!["load", "-vv", "-m", "skb", "-p", &maps, "-P", &priority, LINK];
        arguments.extend(std::iter::repeat_n(&*filter, number));
        let loaded = run_with_timeout(Path::new("xdp-loader"), &arguments, WITHIN).expect("xdp-tools");
        self.maps.push(maps.into());
        loaded
    }

    /// Returns the numbers of packets that came in on the link, and that the filters of each load
    /// passed.
    fn counts(&self) -> Vec<u64> {
        let passed = |maps: &PathBuf| {
            let map = MapData::from_pin(maps.join("xdp_stats_map")).expect("pinned");
            let counts: PerCpuArray<_, [u64; 2]> = Map::PerCpuArray(map).try_into().expect("its type");
            counts.get(&XDP_PASS, 0).expect("read").iter().map(|[packets, _]| packets).sum()
        };
        [self.bench.received(LINK)].into_iter().chain(self.maps.iter().map(passed)).collect()
    }

    /// Makes a change while packets come in. All filters must see each packet.
    fn change(&mut self, what: &str, change: impl FnOnce(&mut Self)) {
        let before = self.counts();
        // Those of the thread may come too late, if the change is quick.
        send();
        while_sending(|| change(self));
        let new =
            || -> Vec<u64> { self.counts().iter().zip(&before).map(|(now, then)| now - then).collect() };
        // The last packets may still be on their way.
        Deadline::after(WITHIN).poll(|| new().iter().all(|count| *count == new()[0]).then_some(()));
        let new = new();
        assert!(new[0] > 0 && new.iter().all(|count| *count == new[0]), "{what}: {new:?}");
    }

    /// Attaches shunt's program.
    fn attach(&mut self) {
        self.bench.attach_xdp(LINK, XdpMode::Generic);
    }

    /// Returns the id of the dispatcher.
    fn dispatcher(&self) -> String {
        let directories = fs::read_dir(PINS).expect("libxdp's directory").flatten();
        let prefix = format!("dispatch-{}-", self.bench.index(LINK));
        let names = directories.filter_map(|entry| entry.file_name().into_string().ok());
        let mut ids = names.filter_map(|name| Some(name.strip_prefix(&prefix)?.to_owned()));
        let id = ids.next().expect("the directory of the dispatcher");
        assert_eq!(ids.next(), None, "that of the former one is gone");
        id
    }
}

impl Drop for Others {
    fn drop(&mut self) {
        let _ = run_with_timeout(Path::new("xdp-loader"), &["unload", "-a", LINK], WITHIN);
        for maps in &self.maps {
            let _ = fs::remove_dir_all(maps);
        }
        // If it is empty.
        let _ = fs::remove_dir(PINS);
    }
}

/// Sends a packet that comes in on the link.
fn send() {
    let socket = UdpSocket::bind("198.51.100.1:0").expect("an address of v1");
    socket.set_broadcast(true).expect("broadcast");
    socket.send_to(b"x", "198.51.100.255:9").expect("send");
}

/// Sends packets while something changes.
fn while_sending(change: impl FnOnce()) {
    let is_done = AtomicBool::new(false);
    let home = fs::File::open("/proc/thread-self/ns/net").expect("procfs");
    thread::scope(|scope| {
        scope.spawn(|| {
            setns(&home, CloneFlags::CLONE_NEWNET).expect("the namespace of the test");
            while !is_done.load(Ordering::Relaxed) {
                send();
                thread::sleep(Duration::from_micros(200));
            }
        });
        change();
        is_done.store(true, Ordering::Relaxed);
    });
}

/// Returns the component programs in the order in which they run: priority, name and id, as
/// xdp-loader prints them.
fn rows() -> Vec<[String; 3]> {
    let status = run("xdp-loader", &["status", LINK]);
    let rows = status.lines().filter_map(|line| line.trim().strip_prefix("=>"));
    let row = |row: &str| {
        let cells: Vec<&str> = row.split_whitespace().collect();
        [cells[0], cells[1], cells[2]].map(str::to_owned)
    };
    rows.map(row).collect()
}

fn names() -> Vec<String> {
    rows().into_iter().map(|[_, name, _]| name).collect()
}

/// One test: xdp-loader runs once at a time.
#[test]
fn program_joins_the_dispatcher_and_leaves_it_while_the_others_see_every_packet() {
    let Some(mut others) = Others::new() else { return };
    others.load(90, 1);
    others.bench.sync();
    let all = [FILTERS, SHUNT, FILTERS];
    others.change("it joins", Others::attach);
    assert_eq!(names(), all);
    assert_eq!(rows()[1][0], "50");

    let dispatcher = others.dispatcher();
    others.bench.model_settings.xdp = XdpPolicy::Generic;
    others.change("it stays", |others| others.bench.restart());
    others.bench.sync();
    assert_eq!(others.dispatcher(), dispatcher, "the programs of the earlier process are used again");

    // Another program, as that of another version.
    let id = rows()[1][2].clone();
    others.bench.settings.log = LogLevel::Info;
    others.bench.restart();
    others.change("it is exchanged", |others| assert!(others.bench.sync() > 0));
    assert_eq!(names(), all);
    assert_ne!(rows()[1][2], id);
    assert_eq!(others.bench.verify(), 0, "nothing is left to do");

    others.bench.model_settings.xdp = XdpPolicy::Off;
    others.change("it leaves", |others| assert!(others.bench.sync() > 0));
    assert_eq!(names(), [FILTERS; 2]);

    others.attach();
    let pins = others.bench.settings.pin_dir.clone();
    others.change("it is cleaned up", |_| assert!(Ebpf::cleanup_at(&pins).is_empty()));
    assert_eq!(names(), [FILTERS; 2]);

    others.bench.restart();
    others.attach();
    fs::remove_dir_all(&pins).expect("bpffs");
    assert_eq!(names(), all);
    assert_eq!(Ebpf::cleanup_at(&pins).len(), 0);
    assert_eq!(names(), [FILTERS; 2], "it needs no pins of shunt");
    stays_beside_what_others_load(others);
}

/// xdp-loader adds and removes programs beside shunt's, until shunt's is alone, and then more than
/// there is room for.
fn stays_beside_what_others_load(mut others: Others) {
    others.bench.restart();
    others.attach();
    let rows = rows();
    assert_eq!(rows.len(), 3);
    for row in [&rows[0], &rows[2]] {
        run("xdp-loader", &["unload", "-i", &row[2], LINK]);
    }
    assert_eq!(names(), [SHUNT], "xdp-loader keeps what others load");
    others.load(20, 9);
    assert_eq!(names().len(), 10);
    others.bench.verify();
    assert_eq!(names(), [FILTERS; 9]);
    others.load(30, 1);
    others.attach();
    assert_eq!(names(), [FILTERS; 10], "there is no room for another");
}
