//! What the first packet of a connection meets: the rules of the mirror, gone through.

use super::*;
use crate::kernel::nftables::Selector;

/// Where a packet comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum From {
    Outside,
    Pod,
    Node,
}

impl From {
    pub(super) const ALL: [Self; 3] = [Self::Outside, Self::Pod, Self::Node];
}

/// What becomes of a packet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Meets {
    /// One of these endpoints gets it, by chance.
    pub(super) endpoints: BTreeSet<SocketAddr>,
    pub(super) is_masqueraded: bool,
    /// It is refused, or dropped; only told where no endpoint gets it.
    pub(super) answer: Option<Answer>,
    /// It may be that no endpoint gets it though others do.
    pub(super) falls_through: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Refused,
    Dropped,
}

pub(super) fn meets(state: &State, family: Family, destination: &Destination, from: From) -> Meets {
    let mut walk = Walk { table: state.table(family), destination, from, meets: Meets::default() };
    let is_decided = walk.chain("services");
    walk.meets.falls_through = !is_decided && !walk.meets.endpoints.is_empty();
    if walk.meets.endpoints.is_empty() {
        walk.meets.is_masqueraded = false;
        walk.chain(if destination.address.is_some() {
            "service-endpoints-check"
        } else {
            "nodeport-endpoints-check"
        });
    }
    walk.meets
}

struct Walk<'a> {
    table: &'a Table,
    destination: &'a Destination,
    from: From,
    meets: Meets,
}

/// How a rule ends.
enum End {
    Decided,
    NextRule,
    Return,
}

impl Walk<'_> {
    /// Whether the packet's way ends there.
    fn chain(&mut self, name: &str) -> bool {
        let rules = self.table.chains.get(name).unwrap_or_else(|| panic!("there is no chain {name}"));
        for rule in rules.as_ref().expect("its rules") {
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
                    if (self.from == From::Pod) != *inside =>
                {
                    return End::NextRule;
                }
                Statement::SourceIsLocal if self.from != From::Node => return End::NextRule,
                Statement::OneIn(_) => is_certain = false,
                Statement::SetMark(_) => self.meets.is_masqueraded = true,
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
                    self.meets.endpoints.insert(*endpoint);
                    return End::Decided;
                }
                Statement::DnatByMap(key, map) => return self.draw(key, map),
                Statement::Reject => {
                    self.meets.answer = Some(Answer::Refused);
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
                self.meets.answer = Some(Answer::Dropped);
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

    /// The destination is asked about; clients that an endpoint knows are somebody else.
    fn is_in(&self, key: &[Selector], set: &str) -> bool {
        let Some(base) = Base::of(set) else { return false };
        match (key, self.destination.address) {
            ([Selector::Source], _) => false,
            ([Selector::Destination], None) => base == Base::NodePortIps,
            ([Selector::Destination], Some(address)) => {
                let key = ElementKey::new(&[crate::kernel::nftables::Field::Address(address)]);
                self.table.elements.contains_key(&(base, key))
            }
            _ => self.table.elements.contains_key(&(base, self.destination.key())),
        }
    }

    fn verdict(&self, map: &str) -> Option<Verdict> {
        let base = Base::of(map).expect("one of ours");
        match &self.table.elements.get(&(base, self.destination.key()))?.value {
            ElementValue::Verdict(led) => Some(led.verdict.clone()),
            other => panic!("{map} holds {other:?}"),
        }
    }

    fn draw(&mut self, key: &[Selector], map: &str) -> End {
        let Some(Selector::Random(below)) = key.last() else { panic!("{key:?} draws nothing") };
        let base = Base::of(map).expect("one of ours");
        let drawn = (0..*below).map(|number| self.table.elements.get(&(base, self.destination.slot(number))));
        let drawn: Vec<_> = drawn.collect();
        let endpoint = |held: &&Held| match held.value {
            ElementValue::Data(data) => data.to_endpoint(),
            _ => None,
        };
        self.meets.endpoints.extend(drawn.iter().flatten().filter_map(endpoint));
        if drawn.iter().all(Option::is_some) { End::Decided } else { End::NextRule }
    }
}
