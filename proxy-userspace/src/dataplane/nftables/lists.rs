//! Lists of endpoints, and the chains that choose from them: one for each size of list, whatever the number of Services.
//!
//! The kernel draws a number below another that has to stand in the rule, and one map of all Services says which endpoint that
//! is. Sizes are powers of two, and numbers that nobody has are drawn again: so which sets and chains there are hardly ever
//! changes, and an endpoint more is an element more.

use super::{
    sets::{Base, DESTINATION, DESTINATION_PORT},
    table::Basis,
};
use crate::kernel::nftables::{Family, Name, Rule, Selector, Statement, Verdict};

/// Endpoints that destinations have, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum List {
    /// Of addresses.
    Services,
    /// The same of this node, for traffic policy Local.
    LocalServices,
    /// Of node ports.
    NodePorts,
    /// The same of this node.
    LocalNodePorts,
}

/// How many numbers are drawn from: two to this power.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Size(u8);

/// A list of a size: a set of the destinations that have one, and a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Sized {
    pub(super) list: List,
    pub(super) size: Size,
}

/// A number that nobody has is drawn again so often. More than half of the numbers are somebody's. With five endpoints of eight the
/// fifth then gets 0.3 % less than the others, with many and one more than a power of two 1.6 %.
const DRAWS: usize = 6;

impl Size {
    /// All that there are.
    pub(super) const ALL: [Self; 17] = {
        let mut all = [Self(0); 17];
        let mut power = 0;
        while power < 17 {
            all[power as usize] = Self(power);
            power += 1;
        }
        all
    };

    /// That of a list; more endpoints than the largest has get no traffic.
    pub(super) fn of(count: usize) -> Self {
        let power = count.max(1).next_power_of_two().trailing_zeros();
        Self::ALL[(power as usize).min(Self::ALL.len() - 1)]
    }

    pub(super) const fn numbers(self) -> u32 {
        1 << self.0
    }

    pub(super) const fn index(self) -> usize {
        self.0 as usize
    }
}

impl List {
    pub(super) const ALL: [Self; 4] =
        [Self::Services, Self::LocalServices, Self::NodePorts, Self::LocalNodePorts];

    /// The map of endpoints.
    pub(super) const fn endpoints(self) -> Base {
        match self {
            Self::Services => Base::ServiceEndpoints,
            Self::LocalServices => Base::ServiceLocalEndpoints,
            Self::NodePorts => Base::NodePortEndpoints,
            Self::LocalNodePorts => Base::NodePortLocalEndpoints,
        }
    }

    /// Whether destinations are ports of the node.
    pub(super) const fn is_of_node_ports(self) -> bool {
        matches!(self, Self::NodePorts | Self::LocalNodePorts)
    }

    /// The chain that chooses from a list of any size; those of one size begin with the same.
    pub(super) const fn chain(self) -> &'static str {
        match self {
            Self::Services => "endpoints",
            Self::LocalServices => "local-endpoints",
            Self::NodePorts => "nodeport-endpoints",
            Self::LocalNodePorts => "nodeport-local-endpoints",
        }
    }

    /// What the names of the sets of destinations begin with.
    pub(super) const fn destinations(self) -> &'static str {
        match self {
            Self::Services => "service-ips",
            Self::LocalServices => "service-ips-local",
            Self::NodePorts => "service-nodeports",
            Self::LocalNodePorts => "service-nodeports-local",
        }
    }

    /// What a destination is known by.
    fn destination(self) -> Vec<Selector> {
        if self.is_of_node_ports() { DESTINATION_PORT.into() } else { DESTINATION.into() }
    }

    /// That the packet's destination is in the set.
    pub(super) fn is_in(self, set: Base) -> Statement {
        Statement::InSet(self.destination(), set.name())
    }

    /// The rules of its chain, where these sizes are in use. A list that gets shorter may be in neither set that is looked into, if
    /// that happens just then: its first endpoint is there as long as it has any.
    pub(super) fn rules(self, sizes: impl IntoIterator<Item = Size>) -> Vec<Rule> {
        let to_size = |size| {
            let this = Sized { list: self, size };
            Rule::new([self.is_in(Base::Sized(this)), Statement::Verdict(Verdict::Goto(this.chain()))])
        };
        let last = self.draw(1).comment("the list has just become shorter");
        sizes.into_iter().map(to_size).chain([last]).collect()
    }

    fn draw(self, below: u32) -> Rule {
        let key = self.destination().into_iter().chain([Selector::Random(below)]).collect();
        Rule::new([Statement::DnatByMap(key, self.endpoints().name())])
    }
}

impl Sized {
    /// The name of its chain.
    pub(super) fn chain(self) -> Name {
        format!("{}-{}", self.list.chain(), self.size.numbers()).into()
    }

    /// The rules of its chain. In the end a number is drawn that somebody has in any case.
    pub(super) fn rules(self) -> Vec<Rule> {
        let numbers = self.size.numbers();
        let draws = if numbers > 2 { DRAWS } else { 1 };
        let draw = |time| match time {
            0 => self.list.draw(numbers),
            _ => self.list.draw(numbers).comment("nobody had that number"),
        };
        let half = (numbers > 1).then(|| self.list.draw(numbers / 2).comment("these are all somebody's"));
        (0..draws).map(draw).chain(half).collect()
    }
}

/// Traffic from outside the cluster: its answers have to come back through this node.
pub(super) fn external(basis: &Basis, to: Name) -> Vec<Rule> {
    let goto = Statement::Verdict(Verdict::Goto(to));
    vec![Rule::new([Statement::SetMark(basis.masquerade)]).comment("masquerade"), Rule::new([goto])]
}

/// What does not come from outside goes past externalTrafficPolicy Local.
pub(super) fn short_circuit(basis: &Basis, family: Family, all: &Name) -> Vec<Rule> {
    let goto = || Statement::Verdict(Verdict::Goto(all.clone()));
    let pod = basis.is_from_pod(family, true);
    let pod = pod.map(|pod| Rule::new([pod, goto()]).comment("short-circuit pod traffic"));
    let marked = Rule::new([Statement::SourceIsLocal, Statement::SetMark(basis.masquerade)]);
    let local = Rule::new([Statement::SourceIsLocal, goto()]);
    pod.into_iter()
        .chain([marked.comment("masquerade local traffic"), local.comment("short-circuit local traffic")])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_the_smallest_size_that_its_endpoints_fit_into() {
        for (count, numbers) in [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1000, 1024), (65536, 65536)]
        {
            assert_eq!(Size::of(count).numbers(), numbers, "{count}");
        }
        assert_eq!(Size::of(1 << 20).numbers(), 65536);
    }
}
