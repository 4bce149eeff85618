//! Collects the files of a bug report. What fails is recorded, and stops nothing.

use std::{
    fs::{self, File},
    io::Read as _,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::Serialize;
use serde_json::Value;
use tokio::runtime;

use super::secrets::Secrets;
use crate::{
    causes::with_causes,
    inspect::Client,
    kernel::command::{Command, Launcher},
};

/// The largest file. The rest of a longer one is cut off.
const MAX_BYTES: usize = 4 << 20;
/// The time limit of a command.
const LIMIT: Duration = Duration::from_secs(20);
/// How many sysctls are read.
const MAX_SYSCTLS: usize = 20_000;

/// What the daemon answers on its local socket, with the name of the file.
const ANSWERS: [(&str, &str); 15] = [
    ("node.json", "/v1/node"),
    ("configz.json", "/v1/pages/configz"),
    ("flagz.txt", "/v1/pages/flagz"),
    ("statusz.txt", "/v1/pages/statusz"),
    ("healthz.txt", "/v1/pages/healthz"),
    ("metrics.txt", "/v1/pages/metrics"),
    ("get/services.jsonl", "/v1/get/services?drift=true"),
    ("get/endpoints.jsonl", "/v1/get/endpoints"),
    ("get/flows.jsonl", "/v1/get/flows"),
    ("get/connections.jsonl", "/v1/get/connections"),
    ("get/affinity.jsonl", "/v1/get/affinity"),
    ("get/links.jsonl", "/v1/get/links"),
    ("get/exempt.jsonl", "/v1/get/exempt"),
    ("get/left-out.jsonl", "/v1/get/left-out"),
    ("get/drift.jsonl", "/v1/get/drift"),
];

/// Commands that only read, with the name of the file.
const COMMANDS: [(&str, &str, &[&str]); 22] = [
    ("network/links.txt", "ip", &["-details", "-statistics", "link", "show"]),
    ("network/addresses.txt", "ip", &["address", "show"]),
    ("network/routes4.txt", "ip", &["-4", "route", "show", "table", "all"]),
    ("network/routes6.txt", "ip", &["-6", "route", "show", "table", "all"]),
    ("network/rules4.txt", "ip", &["-4", "rule", "show"]),
    ("network/rules6.txt", "ip", &["-6", "rule", "show"]),
    ("network/neighbours.txt", "ip", &["neighbour", "show"]),
    ("network/namespaces.txt", "ip", &["netns", "list"]),
    ("network/qdiscs.txt", "tc", &["qdisc", "show"]),
    ("netfilter/nft.txt", "nft", &["list", "ruleset"]),
    ("netfilter/iptables.txt", "iptables-save", &["-c"]),
    ("netfilter/ip6tables.txt", "ip6tables-save", &["-c"]),
    ("netfilter/iptables-legacy.txt", "iptables-legacy-save", &["-c"]),
    ("netfilter/ip6tables-legacy.txt", "ip6tables-legacy-save", &["-c"]),
    ("netfilter/ipset.txt", "ipset", &["list"]),
    ("netfilter/ipvs.txt", "ipvsadm", &["--list", "--numeric", "--stats"]),
    ("netfilter/conntrack-statistics.txt", "conntrack", &["-S"]),
    ("bpf/programs.txt", "bpftool", &["prog", "show"]),
    ("bpf/maps.txt", "bpftool", &["map", "show"]),
    ("bpf/links.txt", "bpftool", &["link", "show"]),
    ("bpf/network.txt", "bpftool", &["net", "show"]),
    ("bpf/cgroups.txt", "bpftool", &["cgroup", "tree"]),
];

/// Files of the kernel and the system.
const FILES: [(&str, &str); 9] = [
    ("system/kernel.txt", "/proc/version"),
    ("system/release.txt", "/etc/os-release"),
    ("system/mounts.txt", "/proc/self/mountinfo"),
    ("system/status.txt", "/proc/self/status"),
    ("system/memory.txt", "/proc/meminfo"),
    ("system/modules.txt", "/proc/modules"),
    ("system/uptime.txt", "/proc/uptime"),
    ("netfilter/ip_vs.txt", "/proc/net/ip_vs"),
    ("network/softnet.txt", "/proc/net/softnet_stat"),
];

/// Sysctls that are keys.
const SECRET_SYSCTLS: [&str; 3] = ["stable_secret", "tcp_fastopen_key", "key"];

/// The files so far, without secrets.
#[derive(Debug)]
pub(super) struct Collected {
    pub(super) files: Vec<(String, String)>,
    pub(super) errors: Vec<String>,
    secrets: Secrets,
}

impl Collected {
    /// Collects everything. `report` is that of the doctor.
    pub(super) fn collect(launcher: &Launcher) -> Self {
        let mut answers = Answers::default();
        answers.ask();
        let secrets = Secrets::read(answers.kubeconfig().as_deref());
        let mut this = Self { files: Vec::new(), errors: Vec::new(), secrets };
        for (name, result) in answers.0 {
            this.add_result(name, result);
        }
        for (name, program, arguments) in COMMANDS {
            let output = Command::new(program, launcher).args(arguments).limit(LIMIT).run();
            this.add_result(
                name,
                output.map(|output| output.stdout.into_bytes()).map_err(|e| with_causes(&e)),
            );
        }
        for (name, path) in FILES {
            this.add_result(name, read(Path::new(path)));
        }
        this.add_sysctls();
        this
    }

    /// Adds a document as JSON.
    pub(super) fn add_json(&mut self, name: &str, document: &impl Serialize) {
        self.add_result(name, serde_json::to_vec_pretty(document).map_err(|error| error.to_string()));
    }

    fn add_result(&mut self, name: &str, content: Result<Vec<u8>, String>) {
        match content {
            Ok(bytes) => self.add(name, &bytes),
            Err(error) => self.errors.push(format!("{name}: {}", self.secrets.redacted(&error))),
        }
    }

    /// Cuts a file that is too long before secrets are removed: what is cut may be half of one.
    fn add(&mut self, name: &str, bytes: &[u8]) {
        let kept = bytes.get(..MAX_BYTES).unwrap_or(bytes);
        let text = String::from_utf8_lossy(kept);
        let text = if kept.len() < bytes.len() {
            self.errors.push(format!("{name}: only the first {MAX_BYTES} bytes of {}", bytes.len()));
            text.rsplit_once('\n').map_or("", |(whole, _)| whole).to_owned()
        } else {
            text.into_owned()
        };
        self.files.push((name.to_owned(), self.secrets.redacted(&text)));
    }

    /// Adds the sysctls of the network, a line each.
    fn add_sysctls(&mut self) {
        let mut lines = Vec::new();
        let mut waiting = vec![PathBuf::from("/proc/sys/net")];
        while let Some(path) = waiting.pop() {
            let entries = fs::read_dir(&path).into_iter().flatten().flatten().map(|entry| entry.path());
            for entry in entries {
                let name = entry.file_name().unwrap_or_default().to_string_lossy().into_owned();
                if entry.is_dir() {
                    waiting.push(entry);
                } else if !SECRET_SYSCTLS.contains(&name.as_str()) && lines.len() < MAX_SYSCTLS {
                    // Some can only be written, or belong to a protocol that is not there.
                    let Ok(value) = fs::read_to_string(&entry) else { continue };
                    let key = entry.strip_prefix("/proc/sys").unwrap_or(&entry).display();
                    lines.push(format!("{key} = {}", value.trim().replace('\n', " ")));
                }
            }
        }
        lines.sort_unstable();
        self.add("network/sysctls.txt", lines.join("\n").as_bytes());
    }
}

/// The answers of the daemon, by file.
#[derive(Default)]
struct Answers(Vec<(&'static str, Result<Vec<u8>, String>)>);

impl Answers {
    fn ask(&mut self) {
        match runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime.block_on(async {
                for (name, path) in ANSWERS {
                    self.0.push((name, answer(path).await));
                }
            }),
            Err(error) => self.0.push(("node.json", Err(error.to_string()))),
        }
    }

    /// Returns the kubeconfig that the daemon uses.
    fn kubeconfig(&self) -> Option<PathBuf> {
        let (_, configz) = self.0.iter().find(|(name, _)| *name == "configz.json")?;
        let configz: Value = serde_json::from_slice(configz.as_ref().ok()?).ok()?;
        let config = configz.as_object()?.values().next()?;
        config["clientConnection"]["kubeconfig"].as_str().filter(|path| !path.is_empty()).map(PathBuf::from)
    }
}

/// Asks over a connection of its own: an answer that breaks off must not end the others.
async fn answer(path: &str) -> Result<Vec<u8>, String> {
    let answered = async { Client::connect().await?.text(path, MAX_BYTES + 1).await };
    answered.await.map_err(|error| with_causes(&error))
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let most = u64::try_from(MAX_BYTES).unwrap_or(u64::MAX).saturating_add(1);
    let done = File::open(path).and_then(|file| file.take(most).read_to_end(&mut bytes));
    done.map(|_| bytes).map_err(|error| format!("cannot read {}: {error}", path.display()))
}
