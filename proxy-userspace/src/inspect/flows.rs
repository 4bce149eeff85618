//! Reads flows from the kernel, a part at a time, and names their Services.

use std::{net::IpAddr, num::NonZeroU16, path::PathBuf};

use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::rows::FlowRow;
use crate::{
    dataplane::{KnownFlow, Translator, for_each_flow},
    kernel::KernelError,
    model::{IpFamily, Model},
    sync::{Inspector, NoAnswer},
};

/// How many flows are named at once.
const FLOWS_AT_ONCE: usize = 512;
/// How many parts may wait for their names.
const WAITING: usize = 2;

/// Which flows to list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowFilter {
    /// Of this client.
    pub client: Option<IpAddr>,
    /// To this address of a Service.
    pub vip: Option<IpAddr>,
    /// To this endpoint.
    pub endpoint: Option<IpAddr>,
    /// In this state.
    pub state: Option<String>,
}

impl FlowFilter {
    fn matches(&self, flow: &KnownFlow) -> bool {
        let is = |wanted: Option<IpAddr>, address: IpAddr| wanted.is_none_or(|wanted| wanted == address);
        is(self.client, flow.client.ip())
            && is(self.vip, flow.destination.ip())
            && is(self.endpoint, flow.endpoint.ip())
            && self.state.as_deref().is_none_or(|wanted| wanted == flow.state.name())
    }
}

/// A part of a list, or why there is none.
pub(super) type FlowPart = Result<Vec<KnownFlow>, KernelError>;

/// Reads the flows that match, in a thread of its own. `pins` is the directory of the programs' maps.
pub(super) fn read(pins: Option<PathBuf>, filter: FlowFilter) -> mpsc::Receiver<FlowPart> {
    let (parts, received) = mpsc::channel(WAITING);
    tokio::task::spawn_blocking(move || {
        let mut part = Vec::with_capacity(FLOWS_AT_ONCE);
        let read = for_each_flow(pins.as_deref(), &mut |flow| {
            if filter.matches(&flow) {
                part.push(flow);
            }
            if part.len() == FLOWS_AT_ONCE {
                // Nobody receives any more: the rest is read in vain, which takes milliseconds.
                drop(parts.blocking_send(Ok(std::mem::take(&mut part))));
            }
        });
        drop(parts.blocking_send(read.map(|()| part)));
    });
    received
}

/// Names the Services of flows.
pub(super) async fn named(inspector: &Inspector, flows: Vec<KnownFlow>) -> Result<Vec<FlowRow>, NoAnswer> {
    inspector.read(move |inspected| flows.iter().map(|flow| row(inspected.model, flow)).collect()).await
}

fn row(model: &Model, flow: &KnownFlow) -> FlowRow {
    let KnownFlow { protocol, client, destination, endpoint, state, by, expires_after } = *flow;
    let service = NonZeroU16::new(destination.port()).and_then(|port| {
        let family = IpFamily::of(destination.ip());
        let of_address = model.owner(Some(destination.ip()), port, protocol, family);
        of_address.or_else(|| model.owner(None, port, protocol, family))
    });
    FlowRow {
        protocol: protocol.name().to_owned(),
        client,
        vip: destination,
        endpoint,
        service: service.map(|owner| owner.key.name.to_string()),
        state: state.name().to_owned(),
        by: match by {
            Translator::Programs => "programs",
            Translator::Netfilter => "netfilter",
        }
        .to_owned(),
        expires_seconds: expires_after.map(|left| left.as_secs()),
    }
}
