//! Takes this node over from another mode or proxy: once all Services are served, shunt takes over
//! the other's connections and removes what it left.

use std::{collections::BTreeSet, net::IpAddr};

use proxy_userspace::{
    assembly,
    causes::with_causes,
    config::Config,
    dataplane::{
        Mode, Renderer,
        ebpf::Ebpf,
        ipvs::{self, LinkRemoval},
    },
    kernel::{KernelError, command::Launcher, conntrack::HandoverCounts, process_memory},
    sync::TakeoverStage,
};

use super::{dataplane, other_proxy};

/// The takeover by the mode that runs. It is done once.
pub(super) struct Takeover {
    /// The dataplanes of modes that broke in this process, oldest first.
    pub(super) broken: Vec<Box<dyn Renderer>>,
    config: Config,
    launcher: Launcher,
    /// An earlier process left programs.
    had_programs: bool,
    is_done: bool,
    link: RemainingLink,
}

impl Takeover {
    pub(super) fn new(
        broken: Vec<Box<dyn Renderer>>,
        config: &Config,
        launcher: &Launcher,
        had_programs: bool,
    ) -> Self {
        let (config, launcher) = (config.clone(), launcher.clone());
        Self { broken, config, launcher, had_programs, is_done: false, link: RemainingLink::default() }
    }

    /// Does nothing if another process uses the pin directory, which the removal reports. A
    /// dataplane that broke in this process still has its lock.
    fn take_over_connections_of_programs(&self) {
        let locked = dataplane::lock_pins(&self.config);
        if locked.is_ok() || !self.broken.is_empty() {
            log_handover("eBPF programs", Ebpf::hand_over(&self.config.ebpf.pin_dir));
        }
    }

    /// Warns if another proxy wrote rules while the programs of an earlier process were in front of
    /// them. The earlier process would have removed such rules, unless they were its backstop.
    fn report_replacement(&self, backstop: Option<Mode>) {
        if self.config.mode != Mode::Ebpf || !self.had_programs || backstop.is_some() {
            return;
        }
        let rules = other_proxy::rules(&self.launcher);
        if !rules.is_empty() {
            tracing::warn!(
                ?rules,
                "another proxy wrote rules behind shunt's programs: while it ran on this node, connections went to \
                 the endpoints of shunt's last run; run shunt --cleanup-own when another proxy takes a node over"
            );
        }
    }
}

impl TakeoverStage for Takeover {
    /// Programs translate before the rules of others, so rules that stay serve only what is left
    /// out. In other modes, rules that stay may come first, and would keep all Services at their
    /// former endpoints.
    fn waits_for_every_service(&self, backstop: Option<Mode>) -> bool {
        !self.is_done && self.config.mode == Mode::Ebpf && backstop.is_none()
    }

    /// Hands connections that programs and IPVS translate over to conntrack. Connections of
    /// netfilter rules are in conntrack already.
    fn take_over_connections(&mut self) {
        if self.is_done || self.launcher.is_shutting_down() {
            return;
        }
        if self.config.mode != Mode::Ebpf {
            self.take_over_connections_of_programs();
        }
        if self.config.mode != Mode::Ipvs {
            log_handover("IPVS", ipvs::hand_over(&assembly::ipvs(&self.config, &self.launcher)));
        }
    }

    /// Removes what others left. During a shutdown it removes nothing: connections that were not
    /// handed over may need it, and the next process does the takeover. An error does not stop the
    /// mode.
    fn remove_others(&mut self, backstop: Option<Mode>) {
        if self.launcher.is_shutting_down() {
            return;
        }
        if !self.is_done {
            self.is_done = true;
            self.report_replacement(backstop);
            let mut errors: Vec<_> = self.broken.drain(..).flat_map(|mut broken| broken.cleanup()).collect();
            errors.extend(dataplane::remove_other_modes(&self.config, backstop, &self.launcher));
            // During a shutdown all commands fail. The next process removes the rest.
            errors.retain(|_| !self.launcher.is_shutting_down());
            for error in errors {
                tracing::warn!(
                    error = with_causes(&error),
                    "cannot remove everything that another mode left: restart shunt to try again"
                );
            }
            self.link.may_exist = self.config.mode != Mode::Ipvs;
            // The start needs more memory than the rest: for the eBPF object, and for whole lists.
            process_memory::release_after_start();
        }
        self.link.remove_if_unused(|| ipvs::remove_link(LinkRemoval::IfUnused));
    }
}

/// The link of the ipvs mode. It stays until this node's own connections no longer need its
/// addresses.
#[derive(Debug, Default)]
struct RemainingLink {
    may_exist: bool,
    /// The addresses that were logged.
    logged: BTreeSet<IpAddr>,
}

impl RemainingLink {
    /// Calls `remove`, which removes unneeded addresses and returns the remaining ones. Logs a
    /// change of these.
    fn remove_if_unused(&mut self, remove: impl FnOnce() -> Result<BTreeSet<IpAddr>, KernelError>) {
        if !self.may_exist {
            return;
        }
        let addresses = match remove() {
            Ok(addresses) => addresses,
            Err(error) => {
                let error = with_causes(&error);
                tracing::debug!(error, "cannot remove the ipvs mode's link: the next full sync tries again");
                return;
            }
        };
        self.may_exist = !addresses.is_empty();
        if addresses == self.logged {
            return;
        }
        if addresses.is_empty() {
            tracing::info!("removed the ipvs mode's link: no connection of this node needs it any more");
        } else {
            tracing::info!(
                ?addresses,
                "the ipvs mode's link stays until this node's own connections from these addresses end"
            );
        }
        self.logged = addresses;
    }
}

/// Logs how a handover of connections to conntrack ended.
pub(super) fn log_handover<E: std::error::Error + 'static>(
    from: &'static str,
    outcome: Result<HandoverCounts, E>,
) {
    match outcome {
        Ok(done) if done == HandoverCounts::default() => {}
        Ok(HandoverCounts { connections, lost: 0 }) => {
            tracing::info!(from, connections, "handed connections over to conntrack");
        }
        Ok(HandoverCounts { connections, lost }) => {
            tracing::warn!(
                from,
                connections,
                lost,
                "cannot hand all connections over to conntrack: some end"
            );
        }
        Err(error) => {
            let error = with_causes(&error);
            tracing::warn!(from, error, "cannot hand connections over to conntrack: they may end");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{io, sync::Arc};

    use super::*;

    #[test]
    fn remaining_addresses_are_logged_when_they_change() {
        let (log, writer) = io::pipe().expect("a pipe");
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(Arc::new(writer)).finish();
        let (one, other): (IpAddr, IpAddr) = ([10, 96, 0, 1].into(), [10, 96, 0, 2].into());
        tracing::subscriber::with_default(subscriber, || {
            let mut link = RemainingLink { may_exist: true, ..RemainingLink::default() };
            for remaining in
                [vec![one, other], vec![one, other], vec![one, other], vec![other], vec![other], vec![]]
            {
                link.remove_if_unused(|| Ok(remaining.into_iter().collect()));
            }
            link.remove_if_unused(|| panic!("it is gone"));
        });
        let text = io::read_to_string(log).expect("text");
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert!(lines[0].contains("10.96.0.1, 10.96.0.2") && lines[1].contains("{10.96.0.2}"), "{text}");
        assert!(lines[2].contains("removed"), "{text}");
    }
}
