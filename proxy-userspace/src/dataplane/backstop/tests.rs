//! Tests when the backstop is in place, in which order it and the programs change, and what an
//! error does.

use std::sync::Arc;

use super::*;
use crate::{
    dataplane::{
        DataplaneRenderer, LeftOutReason,
        fake::{Call, FakeDataplane},
    },
    model::{
        Frontend, FrontendKind, IpFamily, Protocol, ResolvedPort, TrafficPolicy,
        testing::{cidrs, ip, key, port_number, resolved_port},
    },
};

/// A backstopped dataplane on two fake kernels.
struct Node {
    programs: FakeDataplane,
    rules: FakeDataplane,
    renderer: Backstopped,
    snapshot: Snapshot,
}

impl Node {
    fn new(policy: BackstopPolicy) -> Self {
        let (programs, rules) = (FakeDataplane::default(), FakeDataplane::default());
        let mut rules_renderer = Some(Box::new(DataplaneRenderer::new(rules.clone())));
        let create = move || match rules_renderer.take() {
            Some(renderer) => Ok((Mode::Nftables, renderer as Box<dyn Renderer>)),
            None => Err("the backstop is created twice".into()),
        };
        let renderer =
            Backstopped::new(Box::new(DataplaneRenderer::new(programs.clone())), policy, Box::new(create));
        Self { programs, rules, renderer, snapshot: Snapshot::default() }
    }

    fn add(&mut self, key: &ServicePortKey) -> Dirty {
        self.snapshot.ports.insert(key.clone(), Arc::new(resolved_port()));
        Dirty { ports: [key.clone()].into(), ..Dirty::default() }
    }

    fn remove(&mut self, key: &ServicePortKey) -> Dirty {
        self.snapshot.ports.remove(key);
        Dirty { ports: [key.clone()].into(), ..Dirty::default() }
    }

    /// Renders like the sync loop does.
    fn sync(&mut self, dirty: &Dirty) -> Result<usize, RenderError> {
        let rendered = self.renderer.render(&self.snapshot, dirty)?;
        assert!(self.renderer.remove_unneeded().is_empty());
        Ok(rendered)
    }

    fn ports_in_rules(&self) -> Vec<ServicePortKey> {
        self.rules.kernel().content.ports.keys().cloned().collect()
    }

    fn needs(&self) -> Vec<BackstopNeed> {
        self.renderer.backstop().map(|backstop| backstop.needs).unwrap_or_default()
    }
}

fn tcp() -> ServicePortKey {
    key("default/web", "http")
}

fn sctp() -> ServicePortKey {
    let mut key = key("default/signalling", "s1");
    key.name.protocol = Protocol::Sctp;
    key
}

#[test]
fn auto_keeps_the_backstop_while_a_service_has_an_sctp_port() {
    let mut node = Node::new(BackstopPolicy::Auto);
    node.add(&tcp());
    node.sync(&Dirty::everything()).expect("renders");
    assert_eq!((node.needs(), node.ports_in_rules()), (vec![], vec![]));

    let dirty = node.add(&sctp());
    node.sync(&dirty).expect("renders");
    assert_eq!((node.needs(), node.ports_in_rules()), (vec![BackstopNeed::Sctp], vec![sctp(), tcp()]));

    let dirty = node.remove(&sctp());
    node.sync(&dirty).expect("renders");
    assert_eq!((node.needs(), node.ports_in_rules()), (vec![], vec![]));

    let dirty = node.add(&sctp());
    node.sync(&dirty).expect("the same backstop is used again");
    assert_eq!(node.ports_in_rules(), [sctp(), tcp()]);
}

#[test]
fn always_and_never_do_not_depend_on_services() {
    let mut node = Node::new(BackstopPolicy::Always);
    node.add(&tcp());
    node.sync(&Dirty::everything()).expect("renders");
    assert_eq!((node.needs(), node.ports_in_rules()), (vec![BackstopNeed::Setting], vec![tcp()]));

    let mut node = Node::new(BackstopPolicy::Never);
    node.add(&sctp());
    node.add(&tcp());
    node.sync(&Dirty::everything()).expect("renders");
    assert_eq!((node.needs(), node.ports_in_rules()), (vec![], vec![]));
}

#[test]
fn sctp_ports_are_left_out_while_no_rules_serve_them() {
    let left_out = |node: &Node| {
        let ports = node.renderer.left_out_ports().into_iter();
        ports.map(|left_out| (left_out.port, left_out.reason)).collect::<Vec<_>>()
    };
    let sctp_is_left_out = vec![(sctp(), LeftOutReason::Protocol)];
    let mut node = Node::new(BackstopPolicy::Never);
    node.add(&sctp());
    node.add(&tcp());
    node.sync(&Dirty::everything()).expect("renders");
    assert_eq!(left_out(&node), sctp_is_left_out);

    let mut node = Node::new(BackstopPolicy::Auto);
    node.add(&sctp());
    node.add(&tcp());
    node.rules.kernel().failures_left = 1;
    let error = node.sync(&Dirty::everything()).expect_err("the backstop fails");
    assert_eq!(error.scope(), FailureScope::ServicePorts, "nothing else needs the backstop: {error}");
    assert_eq!(left_out(&node), sctp_is_left_out);
    node.sync(&Dirty::everything()).expect("the failure is over");
    assert_eq!(left_out(&node), []);
}

#[test]
fn sctp_ports_are_left_out_if_the_kernel_has_no_sctp() {
    let fake = FakeDataplane::default();
    let mut renderer = DataplaneRenderer::new(fake.clone());
    let left_out = |renderer: &DataplaneRenderer<FakeDataplane>| {
        renderer.left_out_ports().into_iter().map(|left_out| left_out.port).collect::<Vec<_>>()
    };
    let mut snapshot = Snapshot::default();
    for key in [sctp(), tcp()] {
        snapshot.ports.insert(key, Arc::new(resolved_port()));
    }
    renderer.render(&snapshot, &Dirty::everything()).expect("renders");
    assert_eq!(left_out(&renderer), []);
    fake.kernel().lacks_sctp = true;
    assert_eq!(left_out(&renderer), [sctp()]);
    snapshot.ports.remove(&sctp());
    renderer.render(&snapshot, &Dirty { ports: [sctp()].into(), ..Dirty::default() }).expect("renders");
    assert_eq!(left_out(&renderer), []);
}

#[test]
fn a_service_port_that_one_part_leaves_out_does_not_stop_the_other() {
    let mut node = Node::new(BackstopPolicy::Auto);
    node.snapshot.node.link_path = LinkPath::Netfilter { why: "a rule".into() };
    node.add(&tcp());
    node.rules.kernel().is_full = true;
    node.programs.kernel().is_full = true;
    let error = node.sync(&Dirty::everything()).expect_err("both are full");
    assert_eq!(error.scope(), FailureScope::ServicePorts, "{error}");
    let needs = node.renderer.backstop().map(|backstop| backstop.needs);
    assert_eq!(needs, Some(vec![BackstopNeed::Links("a rule".into())]), "the backstop is in place");
    assert_eq!(node.renderer.left_out_ports().len(), 2);
    let of_programs = node.programs.kernel().content.node.link_path.clone();
    assert!(matches!(of_programs, LinkPath::Netfilter { .. }), "{of_programs:?}");
}

#[test]
fn a_change_costs_one_operation_in_the_programs_and_one_in_the_backstop() {
    let mut node = Node::new(BackstopPolicy::Always);
    node.add(&tcp());
    node.sync(&Dirty::everything()).expect("renders");
    let dirty = node.add(&key("default/other", "http"));
    assert_eq!(node.sync(&dirty).expect("renders"), 2);
    let observed = |calls: &[Call]| calls.iter().filter(|call| **call == Call::Observe).count();
    assert_eq!(observed(&node.rules.kernel().calls), 1);
}

#[test]
fn the_backstop_is_in_place_before_the_programs_change() {
    let mut node = Node::new(BackstopPolicy::Auto);
    node.sync(&Dirty::everything()).expect("renders");
    node.programs.kernel().failures_left = 1;
    let dirty = node.add(&sctp());
    node.sync(&dirty).expect_err("the programs fail");
    assert_eq!(node.ports_in_rules(), [sctp()]);
}

#[test]
fn the_programs_change_if_the_backstop_fails_and_the_next_full_sync_repairs_it() {
    let mut node = Node::new(BackstopPolicy::Always);
    node.add(&tcp());
    node.rules.kernel().failures_left = 1;
    let error = node.sync(&Dirty::everything()).expect_err("the backstop fails");
    assert_eq!(error.scope(), FailureScope::Node, "{error}");
    assert_eq!(node.programs.kernel().content.ports.len(), 1);
    assert_eq!(node.needs(), []);
    node.sync(&Dirty::everything()).expect("the failure is over");
    assert_eq!((node.needs(), node.ports_in_rules()), (vec![BackstopNeed::Setting], vec![tcp()]));
}

fn of_node() -> Dirty {
    Dirty { node: true, ..Dirty::default() }
}

#[test]
fn a_backstop_that_fails_waits_for_the_next_full_sync() {
    let mut node = Node::new(BackstopPolicy::Always);
    node.rules.kernel().failures_left = usize::MAX;
    node.add(&sctp());
    let first = node.sync(&Dirty::everything()).expect_err("the backstop fails");
    let calls = node.rules.kernel().calls.clone();
    let changed = node.add(&tcp());
    for dirty in [changed, of_node()] {
        let error = node.sync(&dirty).expect_err("the backstop is missing");
        assert_eq!((error.scope(), with_causes(&error)), (first.scope(), with_causes(&first)));
    }
    assert_eq!(node.rules.kernel().calls, calls, "it is not tried again");
    assert_eq!(node.programs.kernel().content.ports.len(), 2);
    node.rules.kernel().failures_left = 0;
    node.snapshot.node.link_path = netfilter();
    node.sync(&of_node()).expect("the node needs it for something else");
    assert_eq!(node.ports_in_rules(), [sctp(), tcp()]);
}

#[test]
fn a_backstop_that_waits_for_its_removal_is_kept_up_to_date() {
    let mut node = Node::new(BackstopPolicy::Auto);
    node.add(&sctp());
    node.sync(&Dirty::everything()).expect("renders");
    let mut dirty = node.remove(&sctp());
    dirty.ports.extend(node.add(&tcp()).ports);
    node.programs.kernel().failures_left = 1;
    node.sync(&dirty).expect_err("the programs fail");
    assert_eq!(node.ports_in_rules(), [tcp()]);
    node.sync(&Dirty::everything()).expect("renders");
    assert_eq!((node.needs(), node.ports_in_rules()), (vec![], vec![]));
}

fn netfilter() -> LinkPath {
    LinkPath::Netfilter { why: "a rule of others".into() }
}

#[test]
fn links_are_left_to_netfilter_once_the_backstop_is_in_place() {
    let mut node = Node::new(BackstopPolicy::Auto);
    node.add(&tcp());
    node.sync(&Dirty::everything()).expect("renders");
    node.snapshot.node.link_path = netfilter();
    node.rules.kernel().failures_left = 1;
    node.sync(&of_node()).expect_err("the backstop fails");
    assert_eq!(node.programs.kernel().content.node.link_path, LinkPath::Programs);
    node.sync(&Dirty::everything()).expect("the failure is over");
    assert_eq!(node.programs.kernel().content.node.link_path, netfilter());
    assert_eq!(node.needs(), [BackstopNeed::Links("a rule of others".into())]);
}

#[test]
fn a_backstop_that_fails_later_does_not_bring_the_programs_back() {
    let mut node = Node::new(BackstopPolicy::Auto);
    node.snapshot.node.link_path = netfilter();
    node.sync(&Dirty::everything()).expect("renders");
    node.rules.kernel().failures_left = 1;
    let dirty = node.add(&tcp());
    node.sync(&dirty).expect_err("the backstop fails");
    assert_eq!(node.programs.kernel().content.node.link_path, netfilter());
}

#[test]
fn the_backstop_goes_after_the_programs_are_back_on_links() {
    let mut node = Node::new(BackstopPolicy::Auto);
    node.add(&tcp());
    node.snapshot.node.link_path = netfilter();
    node.sync(&Dirty::everything()).expect("renders");
    node.snapshot.node.link_path = LinkPath::Programs;
    node.renderer.render(&node.snapshot, &of_node()).expect("renders");
    assert_eq!(node.programs.kernel().content.node.link_path, LinkPath::Programs);
    assert_eq!(node.ports_in_rules(), [tcp()]);
    assert!(node.renderer.remove_unneeded().is_empty());
    assert_eq!((node.needs(), node.ports_in_rules()), (vec![], vec![]));
}

#[test]
fn links_without_room_for_programs_need_the_backstop_in_the_same_sync() {
    let mut node = Node::new(BackstopPolicy::Auto);
    node.add(&tcp());
    node.programs.kernel().left_out = vec!["eth1".into()];
    node.sync(&Dirty::everything()).expect("renders");
    let need = BackstopNeed::LeftOutLinks(vec!["eth1".into()]);
    assert_eq!((node.needs(), node.ports_in_rules()), (vec![need], vec![tcp()]));
    node.programs.kernel().left_out.clear();
    node.sync(&Dirty::everything()).expect("renders");
    assert_eq!((node.needs(), node.ports_in_rules()), (vec![], vec![]));
}

#[test]
fn source_ranges_need_the_backstop_where_a_link_has_no_programs_unless_they_hold_every_source() {
    let mut node = Node::new(BackstopPolicy::Auto);
    node.snapshot.node.has_unserved_links = true;
    node.sync(&Dirty::everything()).expect("renders");
    let frontend = Frontend {
        kind: FrontendKind::LoadBalancerIp,
        address: Some(ip("198.51.100.1")),
        port: port_number(80),
    };
    let ranged = |ranges: &[&str]| ResolvedPort {
        frontends: vec![frontend],
        source_ranges: cidrs(ranges),
        ..resolved_port()
    };
    let set = |node: &mut Node, ranges: &[&str]| {
        node.snapshot.ports.insert(tcp(), Arc::new(ranged(ranges)));
        node.sync(&Dirty { ports: [tcp()].into(), ..Dirty::default() }).expect("renders");
        node.needs()
    };
    assert_eq!(tcp().family, IpFamily::V4);
    assert_eq!(set(&mut node, &["10.244.1.8/32"]), [BackstopNeed::SourceRanges]);
    assert_eq!(set(&mut node, &["0.0.0.0/0"]), []);
    assert_eq!(set(&mut node, &["10.244.0.0/16", "::/0"]), [BackstopNeed::SourceRanges]);
    assert_eq!(set(&mut node, &[]), []);
    node.snapshot.node.has_unserved_links = false;
    assert_eq!(set(&mut node, &["10.244.1.8/32"]), [], "the programs on links decide");
}

#[test]
fn policy_local_needs_the_backstop_where_pods_are_not_known_and_a_link_has_no_programs() {
    let mut node = Node::new(BackstopPolicy::Auto);
    node.snapshot.node.has_unserved_links = true;
    let port = ResolvedPort { external_policy: TrafficPolicy::Local, ..resolved_port() };
    node.snapshot.ports.insert(tcp(), Arc::new(port));
    node.sync(&Dirty::everything()).expect("renders");
    assert_eq!(node.needs(), [BackstopNeed::ExternalPolicy]);
    node.snapshot.node.local_detector = LocalTrafficDetector::Cidrs(cidrs(&["10.244.0.0/16"]));
    node.sync(&of_node()).expect("renders");
    assert_eq!(node.needs(), [], "sockets know the pods");
    node.snapshot.node.local_detector = LocalTrafficDetector::None;
    node.snapshot.node.has_unserved_links = false;
    node.sync(&of_node()).expect("renders");
    assert_eq!(node.needs(), [], "the programs on links decide");
}

#[test]
fn pods_whose_sockets_are_left_alone_need_the_backstop_where_a_link_has_no_programs() {
    let mut node = Node::new(BackstopPolicy::Auto);
    node.add(&tcp());
    node.snapshot.node.socket_scope = SocketScope::Node;
    node.sync(&Dirty::everything()).expect("renders");
    assert_eq!(node.needs(), [], "the programs on links serve them");
    node.snapshot.node.has_unserved_links = true;
    node.sync(&of_node()).expect("renders");
    assert_eq!((node.needs(), node.ports_in_rules()), (vec![BackstopNeed::PodSockets], vec![tcp()]));
    node.snapshot.node.socket_scope = SocketScope::All;
    node.sync(&of_node()).expect("renders");
    assert_eq!(node.needs(), []);
}
