//! Compares what others have set up with the allow-list.

use std::{collections::BTreeSet, ops::RangeInclusive, sync::Arc};

use super::{
    Evidence,
    ruleset::{Action, BaseChain, Chain, Family, Hook, Match, Rule, Source, Table},
    shapes::{ACTIONS, ActionKind, FILTERS, IPTABLES, MATCHES, MatchKind, Stage, allows, is_allowed_chain},
};
use crate::{
    kernel::{bpf::tc, foreign_filters::LinkFilter},
    net::{DirectScope, LinkPath},
};

/// The node ports, unless the API server's `--service-node-port-range` has others.
pub(super) const NODE_PORTS: RangeInclusive<u16> = 30_000..=32_767;
/// The priority of iptables' nat table at prerouting, and of the backstop (`NF_IP_PRI_NAT_DST`).
const DESTINATION_NAT: i32 = -100;
/// The priority at which netfilter translates the source of answers (`NF_IP_PRI_NAT_SRC`).
const SOURCE_NAT: i32 = 100;
/// How deep chains may call each other. The kernel allows 16 calls with nftables
/// (`NFT_JUMP_STACK_SIZE`), and any number with legacy iptables.
const MAX_DEPTH: usize = 64;

/// Returns the path on which others cannot notice that shunt translates. The reason for netfilter
/// is one sentence about the first rule, filter or policy that could.
pub fn judge(evidence: &Evidence) -> LinkPath {
    let rule = || evidence.tables.iter().find_map(|table| TableJudge { table, evidence }.judge());
    let filter = || evidence.filters.iter().find_map(notices_as_filter);
    let policy = || {
        let policy = evidence.policies.first()?;
        Some(format!("an IPsec policy of others can select packets by their addresses: {policy}"))
    };
    match rule().or_else(filter).or_else(policy) {
        Some(why) => LinkPath::Netfilter { why: why.into() },
        None => LinkPath::Programs,
    }
}

/// Returns a sentence about the first rule of others that looks at forwarded packets. On the
/// direct path, rules that count, limit or log see few packets. Chains of type `nat` see only the
/// first packet of a connection. It goes through the stack, except with whole flows.
pub(super) fn forwarding_rule(evidence: &Evidence, scope: DirectScope) -> Option<String> {
    let is_passed_by = |base: BaseChain| {
        matches!(base.hook, Hook::Input | Hook::Output) || base.is_nat && scope == DirectScope::Learned
    };
    evidence.tables.iter().find_map(|table| {
        let judge = TableJudge { table, evidence };
        table.chains.values().filter(|chain| chain.base.is_some_and(|base| !is_passed_by(base))).find_map(
            |chain| {
                let rule = chain.rules.iter().find(|rule| !judge.is_own_jump(rule))?;
                Some(judge.describe("a rule of others looks at forwarded packets", chain, rule))
            },
        )
    })
}

/// Returns the names of the links on which others see packets at a hook. On the direct path,
/// packets that come in pass only the filters before shunt's programs.
pub(super) fn links_with_filters(filters: &[LinkFilter], hook: tc::Hook) -> BTreeSet<Arc<str>> {
    let here = filters.iter().filter(|filter| filter.hook == hook);
    here.map(|filter| Arc::clone(&filter.link)).collect()
}

fn notices_as_filter(filter: &LinkFilter) -> Option<String> {
    let is_known = FILTERS.iter().any(|shape| {
        filter.hook == tc::Hook::Ingress
            && filter.kind == shape.kind
            && filter.redirects_to.as_deref() == Some(shape.redirects_to)
    });
    let LinkFilter { link, kind, name, hook, .. } = filter;
    let hook = match hook {
        tc::Hook::Ingress => "ingress",
        tc::Hook::Egress => "egress",
    };
    let name = name.as_deref().unwrap_or("without a name");
    (!is_known).then(|| {
        format!("a filter of others sees packets of Services beside shunt's programs: {kind} {name} at {hook} of {link}")
    })
}

/// How a chain was reached, and what the jumps to it at nat prerouting have matched.
#[derive(Clone, Copy, Default)]
struct Scope<'a> {
    /// The number of jumps.
    depth: usize,
    /// The destination is an address of the node.
    is_local: bool,
    /// The destination port is given, and no node port.
    is_other_port: bool,
    /// The first rule that looked at the destination, with its chain.
    destination: Option<(&'a Chain, &'a Rule)>,
}

impl<'a> Scope<'a> {
    fn within(self, chain: &'a Chain, rule: &'a Rule) -> Self {
        let mut scope = Self { depth: self.depth + 1, ..self };
        for found in &rule.matches {
            match found {
                Match::LocalDestination => scope.is_local = true,
                Match::DestinationPorts(ports) => {
                    let is_apart = |range: &RangeInclusive<u16>| {
                        range.end() < NODE_PORTS.start() || range.start() > NODE_PORTS.end()
                    };
                    scope.is_other_port |= ports.iter().all(is_apart);
                }
                Match::Destination => {}
                _ => continue,
            }
            scope.destination.get_or_insert((chain, rule));
        }
        scope
    }

    const fn is_published_port(&self) -> bool {
        self.is_local && self.is_other_port
    }
}

/// Chains that were judged already. The key has what the judgement of a chain depends on.
type Judged<'a> = BTreeSet<(&'a str, bool, bool, bool)>;

/// Judges the rules of one table.
#[derive(Clone, Copy)]
pub(super) struct TableJudge<'a> {
    pub(super) table: &'a Table,
    pub(super) evidence: &'a Evidence,
}

impl<'a> TableJudge<'a> {
    fn judge(self) -> Option<String> {
        self.table.chains.values().find_map(|chain| {
            let base = chain.base?;
            let stage = stage_of(self.table.family, base)?;
            // Accepting is no effect if the end of the chain accepts too. A chain of shunt or
            // kube-proxy later in the base chain would be left out.
            let skips_own = chain.rules.iter().any(|rule| self.is_own_jump(rule));
            let accepting_matters = !base.accepts || skips_own;
            if !self.has_effect(chain, accepting_matters) {
                return None;
            }
            self.judge_chain(chain, stage, Scope::default(), &mut BTreeSet::new())
        })
    }

    /// Returns true if a rule calls a chain of shunt, kube-proxy or the kubelet.
    pub(super) fn is_own_jump(self, rule: &Rule) -> bool {
        let is_iptables = self.table.source != Source::Nft
            || IPTABLES.contains(&&*self.table.name) && matches!(self.table.family, Family::Ip | Family::Ip6);
        is_iptables
            && rule
                .actions
                .iter()
                .any(|action| matches!(action, Action::Jump(to) | Action::Goto(to) if is_allowed_chain(to)))
    }

    /// Returns true if packets that pass the chain can be treated otherwise than if it were empty.
    fn has_effect(self, chain: &'a Chain, accepting_matters: bool) -> bool {
        self.has_effect_at(0, chain, accepting_matters, &mut BTreeSet::new())
    }

    /// Does the same for a chain at this depth of calls. What chains in `seen` do is known.
    fn has_effect_at(
        self,
        depth: usize,
        chain: &'a Chain,
        accepting_matters: bool,
        seen: &mut BTreeSet<&'a str>,
    ) -> bool {
        if !seen.insert(&chain.name) {
            return false;
        }
        let rules = chain.rules.iter().filter(|rule| !self.is_own_jump(rule));
        rules.flat_map(|rule| &rule.actions).any(|action| match action {
            Action::Return => false,
            Action::Accept => accepting_matters,
            Action::Jump(_) | Action::Goto(_) if depth >= MAX_DEPTH => true,
            Action::Jump(to) | Action::Goto(to) => self
                .table
                .chain(to)
                .is_none_or(|to| self.has_effect_at(depth + 1, to, accepting_matters, seen)),
            _ => true,
        })
    }

    /// Judges the rules of a chain that has an effect, and the chains that it calls.
    fn judge_chain(
        self,
        chain: &'a Chain,
        stage: Stage,
        scope: Scope<'a>,
        judged: &mut Judged<'a>,
    ) -> Option<String> {
        let key = (&*chain.name, scope.is_local, scope.is_other_port, scope.destination.is_some());
        if !judged.insert(key) {
            return None;
        }
        if scope.depth > MAX_DEPTH {
            let (table, name) = (self.table, &chain.name);
            return Some(format!(
                "rules of others call more than {MAX_DEPTH} chains in a row: {table} {name}"
            ));
        }
        let rules = chain.rules.iter().filter(|rule| !self.is_own_jump(rule));
        rules.into_iter().find_map(|rule| self.judge_rule(chain, rule, stage, scope, judged))
    }

    fn judge_rule(
        self,
        chain: &'a Chain,
        rule: &'a Rule,
        stage: Stage,
        scope: Scope<'a>,
        judged: &mut Judged<'a>,
    ) -> Option<String> {
        let actions: Vec<_> = rule.actions.iter().filter(|action| self.matters(action)).collect();
        if actions.is_empty() {
            return None;
        }
        let inner = scope.within(chain, rule);
        let is_published = stage == Stage::NatPrerouting && inner.is_published_port();
        let at = if is_published { Stage::PublishedPort } else { stage };
        let because = |reason: String| Some(self.describe(&reason, chain, rule));
        for found in &rule.matches {
            let kind = self.match_kind(found);
            let is_later = stage == Stage::NatPrerouting && kind == MatchKind::Destination;
            if !is_later && !allows(MATCHES, &kind, at) {
                return because(self.match_reason(found, kind, at));
            }
        }
        for action in actions {
            let kind = self.action_kind(action);
            if !allows(ACTIONS, &kind, at) {
                return because(self.action_reason(action, kind, at));
            }
            if let Some((chain, rule)) = noticed_destination(action, at, (chain, rule), inner) {
                return Some(self.describe(&destination_reason(at), chain, rule));
            }
            if let Action::Jump(to) | Action::Goto(to) = action
                && let Some(to) = self.table.chain(to)
                && let Some(why) = self.judge_chain(to, stage, inner, judged)
            {
                return Some(why);
            }
        }
        None
    }

    /// Returns true unless the action is a call of a chain without effect.
    fn matters(self, action: &Action) -> bool {
        let Action::Jump(to) = action else { return true };
        self.table.chain(to).is_none_or(|to| self.has_effect(to, true))
    }

    fn match_kind(self, found: &Match) -> MatchKind {
        match found {
            Match::Plain => MatchKind::Plain,
            Match::Source => MatchKind::Source,
            Match::Destination | Match::DestinationPorts(_) | Match::LocalDestination => {
                MatchKind::Destination
            }
            Match::ReversePath if self.evidence.routes_by_source => MatchKind::ReversePathByRule,
            Match::ReversePath => MatchKind::ReversePath,
            Match::Mark(bits) | Match::ConnectionMark(bits) if bits & self.evidence.own_marks != 0 => {
                MatchKind::OwnMark
            }
            Match::Mark(_) | Match::ConnectionMark(_) => MatchKind::Mark,
            Match::ConnectionState => MatchKind::ConnectionState,
            Match::ConnectionAddress => MatchKind::ConnectionAddress,
            Match::Translation => MatchKind::Translation,
            Match::OriginalDestination => MatchKind::OriginalDestination,
            Match::Unknown(_) => MatchKind::Unknown,
        }
    }

    fn action_kind(self, action: &Action) -> ActionKind {
        match action {
            Action::Accept | Action::Drop => ActionKind::Verdict,
            // A listing has all chains of its table.
            Action::Jump(to) if self.table.chain(to).is_none() => ActionKind::Unknown,
            Action::Return | Action::Goto(_) | Action::Jump(_) => ActionKind::Branch,
            Action::SetMark(bits) | Action::ConnectionMark(bits) if bits & self.evidence.own_marks != 0 => {
                ActionKind::SetOwnMark
            }
            Action::SetMark(_) | Action::ConnectionMark(_) => ActionKind::SetMark,
            Action::Log => ActionKind::Log,
            Action::Modify => ActionKind::Modify,
            Action::SourceNat => ActionKind::SourceNat,
            Action::DestinationNat => ActionKind::DestinationNat,
            Action::Unknown(_) => ActionKind::Unknown,
        }
    }

    fn match_reason(self, found: &Match, kind: MatchKind, at: Stage) -> String {
        match (kind, at) {
            (_, Stage::Bridge) => bridge_reason(),
            (MatchKind::Destination | MatchKind::ConnectionAddress, _) => destination_reason(at),
            (MatchKind::ReversePathByRule, _) => {
                "a rule of others looks up the route back to the source, while a routing rule selects by source".into()
            }
            (MatchKind::Source, _) => "a rule of others looks at the source of answers after netfilter's translation, \
                                       and before shunt's programs translate it"
                .into(),
            (MatchKind::OwnMark, _) => self.mark_reason(),
            (MatchKind::Translation, _) => {
                "a rule of others tells connections that netfilter translated from other connections".into()
            }
            (MatchKind::OriginalDestination, _) => {
                "a rule of others looks at the destination that a connection had before its translation".into()
            }
            _ => match found {
                Match::Unknown(name) => format!("shunt does not know what a rule of others looks at ({name})"),
                _ => "shunt does not know what a rule of others does at this hook".into(),
            },
        }
    }

    fn action_reason(self, action: &Action, kind: ActionKind, at: Stage) -> String {
        match (kind, at, action) {
            (_, Stage::Bridge, _) => bridge_reason(),
            (ActionKind::SetOwnMark, ..) => self.mark_reason(),
            (ActionKind::DestinationNat, ..) => {
                "a rule of others translates the destination of packets that can belong to Services".into()
            }
            (ActionKind::Log, ..) => {
                "a rule of others logs packets where their addresses depend on who translates".into()
            }
            (_, _, Action::Unknown(name)) => {
                format!("shunt does not know what a rule of others does ({name})")
            }
            _ => "a rule of others decides about packets where others than shunt are not expected to".into(),
        }
    }

    fn mark_reason(self) -> String {
        format!("a rule of others uses a mark bit of shunt ({:#x})", self.evidence.own_marks)
    }

    fn describe(self, reason: &str, chain: &Chain, rule: &Rule) -> String {
        format!("{reason}: {} {} `{}`", self.table, chain.name, rule.text)
    }
}

fn bridge_reason() -> String {
    "a rule of others handles frames of bridges".into()
}

fn destination_reason(at: Stage) -> String {
    match at {
        Stage::NatPrerouting => {
            "a rule of others looks at the destination where shunt's rules would translate it"
        }
        _ => "a rule of others looks at the destination before shunt's rules could translate it",
    }
    .into()
}

/// Returns the rule at nat prerouting whose look at the destination decides about an action. A jump
/// decides nothing yet. A return decides only by its own rule: the rules that it leaves out are
/// judged themselves.
fn noticed_destination<'a>(
    action: &Action,
    at: Stage,
    here: (&'a Chain, &'a Rule),
    scope: Scope<'a>,
) -> Option<(&'a Chain, &'a Rule)> {
    if at != Stage::NatPrerouting || matches!(action, Action::Jump(_)) {
        return None;
    }
    let own_destination = Scope::default().within(here.0, here.1).destination;
    if matches!(action, Action::Return | Action::Goto(_)) { own_destination } else { scope.destination }
}

/// Returns the stage of a base chain; `None` if it sees no packets of Services.
fn stage_of(family: Family, BaseChain { hook, is_nat, priority, .. }: BaseChain) -> Option<Stage> {
    Some(match (family, hook) {
        (Family::Arp, _) => return None,
        (Family::Bridge, _) | (_, Hook::Unknown) => Stage::Bridge,
        (_, Hook::Ingress) => Stage::BeforeNat,
        (_, Hook::Egress) => Stage::AfterSourceNat,
        (_, Hook::Prerouting) if is_nat => Stage::NatPrerouting,
        (_, Hook::Prerouting) if priority <= DESTINATION_NAT => Stage::BeforeNat,
        (_, Hook::Input | Hook::Output) if is_nat => Stage::NatLocal,
        (_, Hook::Postrouting) if is_nat => Stage::NatPostrouting,
        (_, Hook::Postrouting) if priority >= SOURCE_NAT => Stage::AfterSourceNat,
        (_, Hook::Prerouting | Hook::Input | Hook::Forward | Hook::Output | Hook::Postrouting) => {
            Stage::AfterNat
        }
    })
}
