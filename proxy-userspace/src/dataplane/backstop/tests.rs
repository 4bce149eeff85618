//! Tests when the backstop is in place, in which order it and the programs change, and what an
//! error does.

use std::sync::Arc;

use super::*;
use crate::{
    dataplane::{
        DataplaneRenderer,
        fake::{Call, FakeDataplane},
    },
    model::testing::{key, resolved_port},
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
    node.sync(&Dirty::everything()).expect("renders");
    assert_eq!((node.needs(), node.ports_in_rules()), (vec![], vec![]));
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
    assert!(error.is_partial(), "{error}");
    assert_eq!(node.programs.kernel().content.ports.len(), 1);
    assert_eq!(node.needs(), []);
    node.sync(&Dirty::everything()).expect("the failure is over");
    assert_eq!((node.needs(), node.ports_in_rules()), (vec![BackstopNeed::Setting], vec![tcp()]));
}
