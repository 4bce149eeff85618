//! Finds what netfilter rules of others may do to a connection that `shunt explain` explains.

use std::{net::SocketAddr, time::Duration};

use proxy_userspace::{
    causes::with_causes,
    dataplane::Mode,
    explain::{Explanation, Location, Verdict},
    kernel::command::Launcher,
    link_path::{self, Way, ruleset::Hook, shapes::IPTABLES},
    model::Protocol,
};
use tokio::{task::spawn_blocking, time::timeout};

/// How long reading may take.
const PATIENCE: Duration = Duration::from_secs(15);

/// Returns the rules in this network namespace that the connection may meet. `None` if shunt itself
/// ends it. If the rules cannot be read, the only text says why.
pub(super) async fn rules(explanation: &Explanation) -> Option<Vec<String>> {
    let way = way(explanation)?;
    let tables = tables(explanation);
    let read = spawn_blocking(move || link_path::read_tables(&Launcher::default(), &tables));
    Some(match timeout(PATIENCE, read).await {
        Ok(Ok(Ok(tables))) => link_path::meets(&tables, &way),
        Ok(Ok(Err(error))) => vec![format!("not known: {}", with_causes(&error))],
        Ok(Err(error)) => vec![format!("not known: {error}")],
        Err(_) => vec![format!("not known: reading took longer than {} s", PATIENCE.as_secs())],
    })
}

/// Returns the tables of iptables to read. In the iptables mode, nat has rules of shunt for each
/// Service, and reading them all could take seconds.
fn tables(explanation: &Explanation) -> Vec<&'static str> {
    let has_own = explanation.mode == Mode::Iptables.name();
    IPTABLES.into_iter().filter(|table| *table != "nat" || !has_own).collect()
}

fn way(explanation: &Explanation) -> Option<Way> {
    let destination = explanation.destination;
    let chosen = explanation.endpoints.iter().filter(|endpoint| endpoint.chosen);
    let endpoints: Vec<SocketAddr> = chosen.map(|endpoint| endpoint.address).collect();
    let destinations = match explanation.verdict {
        Verdict::Drop | Verdict::Refuse => return None,
        Verdict::Pass => vec![destination],
        // The packets of a socket carry the endpoint from the start.
        Verdict::Translate if explanation.is_at_socket() => endpoints,
        Verdict::Translate => [vec![destination], endpoints].concat(),
    };
    let protocol = Protocol::ALL.into_iter().find(|known| known.name() == explanation.protocol)?;
    let mut hooks = match explanation.location {
        Location::Node => vec![Hook::Output, Hook::Postrouting, Hook::Egress],
        Location::Pod | Location::Outside => {
            vec![Hook::Ingress, Hook::Prerouting, Hook::Forward, Hook::Postrouting, Hook::Egress]
        }
    };
    // It may be for a process of this node.
    if explanation.verdict == Verdict::Pass
        || destinations.iter().skip(1).any(|to| to.ip() == destination.ip())
    {
        hooks.push(Hook::Input);
    }
    Some(Way { source: explanation.client, destinations, protocol: protocol.lowercase_name(), hooks })
}
