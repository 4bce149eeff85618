//! Endpoint lists, and the chains that select an endpoint. There is one chain for each size of a
//! list, independent of the number of Services.
//!
//! The kernel draws a random number below a constant of the rule, and one map for all Services has
//! the endpoint of each number. Sizes are powers of two, and a number without an endpoint is drawn
//! again. The sets and chains of the sizes therefore rarely change, and an additional endpoint is
//! an additional element.

use super::{
    sets::{DESTINATION, DESTINATION_PORT, SharedSet},
    table::RuleSettings,
};
use crate::{
    kernel::nftables::{Name, Rule, Selector, Statement, Verdict},
    model::IpFamily,
};

/// A kind of endpoint list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum EndpointList {
    /// The endpoints of addresses.
    Services,
    /// The endpoints of addresses on this node, for traffic policy Local.
    LocalServices,
    /// The endpoints of node ports.
    NodePorts,
    /// The endpoints of node ports on this node, for traffic policy Local.
    LocalNodePorts,
}

/// The size of a list as a power of two. It is the number of random numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ListSize(u8);

/// A kind of list with a size. It has a set of the destinations, and a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct SizedList {
    pub(super) list: EndpointList,
    pub(super) size: ListSize,
}

/// How often a number is drawn until it has an endpoint. More than half of the numbers have one.
/// With five endpoints of eight, the fifth gets 0.3 % less than the others. If there are many
/// endpoints, one more than a power of two, the last gets 1.6 % less.
const DRAWS: usize = 6;

impl ListSize {
    pub(super) const ALL: [Self; 17] = {
        let mut all = [Self(0); 17];
        let mut power = 0;
        while power < 17 {
            all[power as usize] = Self(power);
            power += 1;
        }
        all
    };

    /// Returns the size of a list. Endpoints beyond the largest size get no traffic.
    pub(super) fn of(count: usize) -> Self {
        let power = count.max(1).next_power_of_two().trailing_zeros();
        Self::ALL[(power as usize).min(Self::ALL.len() - 1)]
    }

    pub(super) const fn numbers(self) -> u32 {
        1 << self.0
    }
}

impl EndpointList {
    pub(super) const ALL: [Self; 4] =
        [Self::Services, Self::LocalServices, Self::NodePorts, Self::LocalNodePorts];

    /// Returns the map of endpoints.
    pub(super) const fn endpoints(self) -> SharedSet {
        match self {
            Self::Services => SharedSet::ServiceEndpoints,
            Self::LocalServices => SharedSet::ServiceLocalEndpoints,
            Self::NodePorts => SharedSet::NodePortEndpoints,
            Self::LocalNodePorts => SharedSet::NodePortLocalEndpoints,
        }
    }

    pub(super) const fn is_for_node_ports(self) -> bool {
        matches!(self, Self::NodePorts | Self::LocalNodePorts)
    }

    /// Returns the chain that selects from a list of any size. It is also the prefix of the chains
    /// of one size.
    pub(super) const fn chain(self) -> &'static str {
        match self {
            Self::Services => "endpoints",
            Self::LocalServices => "local-endpoints",
            Self::NodePorts => "nodeport-endpoints",
            Self::LocalNodePorts => "nodeport-local-endpoints",
        }
    }

    /// Returns the prefix of the sets of destinations.
    const fn set_prefix(self) -> &'static str {
        match self {
            Self::Services => "service-ips",
            Self::LocalServices => "service-ips-local",
            Self::NodePorts => "service-nodeports",
            Self::LocalNodePorts => "service-nodeports-local",
        }
    }

    /// Returns the key of a destination.
    fn destination(self) -> Vec<Selector> {
        if self.is_for_node_ports() { DESTINATION_PORT.into() } else { DESTINATION.into() }
    }

    /// Returns the statement that matches if the packet's destination is in the set.
    pub(super) fn is_in(self, set: SharedSet) -> Statement {
        Statement::InSet(self.destination(), set.name())
    }

    /// Returns the rules of its chain, if these sizes are in use.
    ///
    /// While a list is getting shorter, its destination may be missing in both sets that are looked
    /// up. The last rule then selects the first endpoint, which every list has.
    pub(super) fn rules(self, sizes: impl IntoIterator<Item = ListSize>) -> Vec<Rule> {
        let to_size = |size| {
            let list = SizedList { list: self, size };
            Rule::new([self.is_in(SharedSet::Sized(list)), Statement::Verdict(Verdict::Goto(list.chain()))])
        };
        let last = self.draw(1).comment("the list is getting shorter");
        sizes.into_iter().map(to_size).chain([last]).collect()
    }

    fn draw(self, modulus: u32) -> Rule {
        let key = self.destination().into_iter().chain([Selector::Random(modulus)]).collect();
        Rule::new([Statement::DnatByMap(key, self.endpoints().name())])
    }
}

impl SizedList {
    /// Returns the name of the chain.
    pub(super) fn chain(self) -> Name {
        format!("{}-{}", self.list.chain(), self.size.numbers()).into()
    }

    /// Returns the name and the comment of the set of destinations.
    pub(super) fn set_name_and_comment(self) -> (String, String) {
        let max = self.size.numbers();
        let comment = match max {
            1 => "destinations with one endpoint".to_owned(),
            2 => "destinations with two endpoints".to_owned(),
            max => format!("destinations with {} to {max} endpoints", max / 2 + 1),
        };
        (format!("{}-{max}", self.list.set_prefix()), comment)
    }

    /// Returns the rules of the chain. The last rule draws a number that always has an endpoint.
    pub(super) fn rules(self) -> Vec<Rule> {
        let numbers = self.size.numbers();
        let draws = if numbers > 2 { DRAWS } else { 1 };
        let draw = |attempt| match attempt {
            0 => self.list.draw(numbers),
            _ => self.list.draw(numbers).comment("the number had no endpoint"),
        };
        let half = (numbers > 1).then(|| self.list.draw(numbers / 2).comment("all these have an endpoint"));
        (0..draws).map(draw).chain(half).collect()
    }
}

/// Returns the rules for traffic from outside the cluster. It is masqueraded, so that the replies
/// come back through this node.
pub(super) fn external(settings: &RuleSettings, to: Name) -> Vec<Rule> {
    let goto = Statement::Verdict(Verdict::Goto(to));
    vec![Rule::new([Statement::SetMark(settings.masquerade_mark)]).comment("masquerade"), Rule::new([goto])]
}

/// Returns the rules that exempt traffic from inside the cluster from externalTrafficPolicy Local.
pub(super) fn short_circuit(settings: &RuleSettings, family: IpFamily, all: &Name) -> Vec<Rule> {
    let goto = || Statement::Verdict(Verdict::Goto(all.clone()));
    let pod = settings.is_from_pod(family, true);
    let pod = pod.map(|pod| Rule::new([pod, goto()]).comment("short-circuit pod traffic"));
    let marked = Rule::new([Statement::SourceIsLocal, Statement::SetMark(settings.masquerade_mark)]);
    let local = Rule::new([Statement::SourceIsLocal, goto()]);
    pod.into_iter()
        .chain([marked.comment("masquerade local traffic"), local.comment("short-circuit local traffic")])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_has_the_smallest_size_that_fits_its_endpoints() {
        for (count, numbers) in [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1000, 1024), (65536, 65536)]
        {
            assert_eq!(ListSize::of(count).numbers(), numbers, "{count}");
        }
        assert_eq!(ListSize::of(1 << 20).numbers(), 65536);
    }
}
