//! Follows the first packet of a connection through the mirror's rules.

use super::*;
use crate::kernel::nftables::Selector;

/// The origin of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    Outside,
    Pod,
    Node,
}

impl Origin {
    pub(super) const ALL: [Self; 3] = [Self::Outside, Self::Pod, Self::Node];
}

/// The outcome for a packet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    /// One of these endpoints receives it, at random.
    pub(super) endpoints: BTreeSet<SocketAddr>,
    pub(super) is_masqueraded: bool,
    /// The answer if no endpoint receives it.
    pub(super) answer: Option<Answer>,
    /// Some random numbers lead to no endpoint, although others do.
    pub(super) falls_through: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Refused,
    Dropped,
}

pub(super) fn outcome(state: &State, family: IpFamily, destination: &Destination, from: Origin) -> Outcome {
    let mut walk = Walk { table: state.table(family), destination, from, outcome: Outcome::default() };
    let is_decided = walk.chain("services");
    walk.outcome.falls_through = !is_decided && !walk.outcome.endpoints.is_empty();
    if walk.outcome.endpoints.is_empty() {
        walk.outcome.is_masqueraded = false;
        walk.chain(if destination.address.is_some() {
            "service-endpoints-check"
        } else {
            "nodeport-endpoints-check"
        });
    }
    walk.outcome
}

struct Walk<'a> {
    table: &'a Table,
    destination: &'a Destination,
    from: Origin,
    outcome: Outcome,
}

/// The end of a rule.
enum End {
    Decided,
    NextRule,
    Return,
}

impl Walk<'_> {
    /// Returns true if the packet gets no further.
    fn chain(&mut self, name: &str) -> bool {
        let rules = self.table.chains.get(name).unwrap_or_else(|| panic!("chain {name} does not exist"));
        for rule in rules.as_ref().expect("known rules") {
            match self.rule(&rule.statements) {
                End::Decided => return true,
                End::Return => return false,
                End::NextRule => {}
            }
        }
        false
    }

    fn rule(&mut self, statements: &[Statement]) -> End {
        let mut is_certain = true;
        for statement in statements {
            match statement {
                Statement::InSet(key, set) if !self.is_in(key, set) => return End::NextRule,
                Statement::Source { inside, .. } | Statement::InputInterface { inside, .. }
                    if (self.from == Origin::Pod) != *inside =>
                {
                    return End::NextRule;
                }
                Statement::SourceIsLocal if self.from != Origin::Node => return End::NextRule,
                Statement::OneIn(_) => is_certain = false,
                Statement::SetMark(_) => self.outcome.is_masqueraded = true,
                Statement::VerdictMap(_, map) => match self.verdict(map) {
                    Some(Verdict::Continue) => {}
                    Some(verdict) => return self.follow(&verdict),
                    None => return End::NextRule,
                },
                Statement::Verdict(verdict) => {
                    let end = self.follow(verdict);
                    return if is_certain { end } else { End::NextRule };
                }
                Statement::Dnat(endpoint) => {
                    self.outcome.endpoints.insert(*endpoint);
                    return End::Decided;
                }
                Statement::DnatByMap(key, map) => return self.draw(key, map),
                Statement::Reject => {
                    self.outcome.answer = Some(Answer::Refused);
                    return End::Decided;
                }
                _ => {}
            }
        }
        End::NextRule
    }

    fn follow(&mut self, verdict: &Verdict) -> End {
        match verdict {
            Verdict::Drop => {
                self.outcome.answer = Some(Answer::Dropped);
                End::Decided
            }
            Verdict::Jump(chain) => {
                if self.chain(chain) {
                    End::Decided
                } else {
                    End::NextRule
                }
            }
            Verdict::Goto(chain) => {
                if self.chain(chain) {
                    End::Decided
                } else {
                    End::Return
                }
            }
            Verdict::Continue => End::NextRule,
            Verdict::Return => End::Return,
        }
    }

    /// Returns true if the destination is in the set. The client is in no set of clients.
    fn is_in(&self, key: &[Selector], set: &str) -> bool {
        let Some(shared) = SharedSet::from_name(set) else { return false };
        match (key, self.destination.address) {
            ([Selector::Source], _) => false,
            ([Selector::Destination], None) => shared == SharedSet::NodePortIps,
            ([Selector::Destination], Some(address)) => {
                let key = ElementKey::new(&[crate::kernel::nftables::Field::Address(address)]);
                self.table.elements.contains_key(&(shared, key))
            }
            _ => self.table.elements.contains_key(&(shared, self.destination.key())),
        }
    }

    fn verdict(&self, map: &str) -> Option<Verdict> {
        let shared = SharedSet::from_name(map).expect("a shared set");
        match &self.table.elements.get(&(shared, self.destination.key()))?.value {
            ElementValue::Verdict(value) => Some(value.verdict.clone()),
            other => panic!("{map} has {other:?}"),
        }
    }

    fn draw(&mut self, key: &[Selector], map: &str) -> End {
        let Some(Selector::Random(modulus)) = key.last() else { panic!("{key:?} has no random number") };
        let shared = SharedSet::from_name(map).expect("a shared set");
        let drawn =
            (0..*modulus).map(|number| self.table.elements.get(&(shared, self.destination.slot(number))));
        let drawn: Vec<_> = drawn.collect();
        let endpoint = |element: &&Element| match element.value {
            ElementValue::Data(data) => data.to_endpoint(),
            _ => None,
        };
        self.outcome.endpoints.extend(drawn.iter().flatten().filter_map(endpoint));
        if drawn.iter().all(Option::is_some) { End::Decided } else { End::NextRule }
    }
}
