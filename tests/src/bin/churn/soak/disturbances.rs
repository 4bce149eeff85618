//! What happens to shunt during the soak test.

use std::{fmt::Write as _, path::Path, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use shunt_tests::{agent::protocol::Protocol, case::ObjectKey, flood::Flood, process, world::Host};

use super::{
    super::{phases::ENDPOINT_SETS, switches::switches},
    Soak,
};

/// A Service for floods. Its endpoint does not answer: a flood fills maps and conntrack, and not
/// the sockets of endpoints that the load uses.
pub(super) const FLOODED_SERVICE: &str = include_str!("flooded.yaml");
/// Its node port.
const FLOODED: &str = "192.168.57.11:30090";
/// Few enough for the node's conntrack, which drops new connections of all if it is full.
const FLOOD_PACKETS: u32 = 20_000;
/// More Services than the map has room for.
const TOO_MANY: usize = 400;
/// Services that come and go.
const SOME: usize = 50;
/// How long the API server is away.
const OUTAGE: Duration = Duration::from_secs(3);
/// How long system calls fail.
const FAILING_SECONDS: &str = "3";
const STRACE_TIMEOUT: Duration = Duration::from_secs(30);
/// Of each of these calls, every seventh fails, from the fifth on.
const FAILING_CALLS: [&str; 3] = [
    "inject=bpf:error=ENOMEM:when=5+7",
    "inject=sendto:error=ENOBUFS:when=5+7",
    "inject=openat:error=EMFILE:when=5+7",
];

/// A disturbance. Afterwards everything is as before it, except the endpoints of one Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Disturbance {
    Kill,
    Stop,
    Endpoints,
    Services,
    FullMap,
    ApiOutage,
    Switches,
    Modes,
    SynFlood,
    UdpFlood,
    FailingCalls,
}

impl Disturbance {
    pub(super) const ALL: [Self; 11] = [
        Self::Kill,
        Self::Stop,
        Self::Endpoints,
        Self::Services,
        Self::FullMap,
        Self::ApiOutage,
        Self::Switches,
        Self::Modes,
        Self::SynFlood,
        Self::UdpFlood,
        Self::FailingCalls,
    ];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Kill => "SIGKILL and a start",
            Self::Stop => "SIGTERM and a start",
            Self::Endpoints => "endpoints change",
            Self::Services => "Services come and go",
            Self::FullMap => "a map is full",
            Self::ApiOutage => "the API server is away",
            Self::Switches => "switches of the ebpf mode",
            Self::Modes => "other modes",
            Self::SynFlood => "a flood of SYNs",
            Self::UdpFlood => "a flood of datagrams",
            Self::FailingCalls => "system calls fail",
        }
    }
}

impl Soak {
    /// Makes a disturbance and ends it.
    pub(super) fn make(&mut self, disturbance: Disturbance) -> Result<()> {
        match disturbance {
            Disturbance::Kill => {
                self.proxy.kill()?;
                self.proxy.start(&mut self.world)
            }
            Disturbance::Stop => {
                self.proxy.stop()?;
                self.proxy.start(&mut self.world)
            }
            Disturbance::Endpoints => self.change_endpoints(20),
            Disturbance::Services => self.with_services(SOME),
            Disturbance::FullMap => self.with_services(TOO_MANY),
            Disturbance::ApiOutage => self.lose_api(),
            Disturbance::Switches => self.make_switches(),
            Disturbance::Modes => self.change_modes(),
            Disturbance::SynFlood => self.flood(Protocol::Tcp),
            Disturbance::UdpFlood => self.flood(Protocol::Udp),
            Disturbance::FailingCalls => self.fail_calls(),
        }
    }

    fn change_endpoints(&mut self, times: usize) -> Result<()> {
        for _ in 0..times {
            self.sets += 1;
            self.set_endpoints(ENDPOINT_SETS[self.sets % ENDPOINT_SETS.len()])?;
            thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    fn with_services(&mut self, count: usize) -> Result<()> {
        let mut text = String::new();
        for number in 0..count {
            let (high, low) = (number / 250, number % 250);
            write!(
                text,
                "---\napiVersion: v1\nkind: Service\nmetadata: {{name: more-{number}, namespace: default}}\n\
                 spec: {{type: ClusterIP, clusterIP: 10.96.{}.{low}, ports: [{{port: 80}}]}}\n",
                16 + high
            )?;
        }
        self.cluster.apply_all(&text)?;
        self.change_endpoints(10)?;
        for number in 0..count {
            let namespace = Some("default".to_owned());
            let key = ObjectKey { kind: "Service".to_owned(), namespace, name: format!("more-{number}") };
            self.cluster.delete(&key)?;
        }
        Ok(())
    }

    fn lose_api(&mut self) -> Result<()> {
        self.cluster.down();
        thread::sleep(OUTAGE);
        self.cluster.up(&self.world)?;
        // Changes of the time without a connection are in the next list.
        self.change_endpoints(5)
    }

    fn make_switches(&mut self) -> Result<()> {
        let sctp = ObjectKey {
            kind: "Service".to_owned(),
            namespace: Some("default".to_owned()),
            name: "association".to_owned(),
        };
        for switch in switches(&self.links) {
            let place = |text: &str| match text {
                "" => self.cluster.delete(&sctp),
                text => self.cluster.apply_all(text),
            };
            self.timeline.begins(switch.name());
            switch.make(&self.world, &place, self.timeline.since)?;
        }
        Ok(())
    }

    fn change_modes(&mut self) -> Result<()> {
        for mode in ["nftables", "iptables", "ebpf"] {
            self.timeline.begins(mode);
            self.proxy.stop()?;
            self.proxy.set_mode(mode, &self.fields)?;
            self.proxy.start(&mut self.world)?;
            self.change_endpoints(5)?;
        }
        Ok(())
    }

    fn flood(&self, protocol: Protocol) -> Result<()> {
        let flood = Flood { protocol, to: FLOODED.parse()?, packets: FLOOD_PACKETS };
        flood.send(&mut self.world.sender(Host::Client)?).map(drop)
    }

    /// Makes system calls of the process fail while endpoints change.
    fn fail_calls(&mut self) -> Result<()> {
        let process = self.proxy.process_id().context("the proxy does not run")?.to_string();
        let injections = FAILING_CALLS.iter().flat_map(|call| ["-e", call]);
        let arguments: Vec<&str> = ["-s", "INT", FAILING_SECONDS, "strace", "-f", "-q", "-o", "/dev/null"]
            .into_iter()
            .chain(["-e", "trace=bpf,sendto,openat"])
            .chain(injections)
            .chain(["-p", &process])
            .collect();
        let ended = thread::scope(|scope| {
            let strace =
                scope.spawn(|| process::run_with_timeout(Path::new("timeout"), &arguments, STRACE_TIMEOUT));
            let changed = self.change_endpoints(20);
            let ended = strace.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            changed.and(ended)
        })?;
        // 124: the time was over.
        ensure!(
            matches!(ended.status.code(), Some(0 | 124)),
            "strace: {}: {}",
            process::describe_status(ended.status),
            ended.stderr.trim()
        );
        Ok(())
    }
}
