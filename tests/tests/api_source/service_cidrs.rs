//! ServiceCIDRs, which a server may not have, or may forbid to read.

use anyhow::{Context as _, Result};
use proxy_userspace::{
    model::{Delta, WatchEvent},
    net::ProxyVariables,
    watch::{ApiSource, ignore_api_requests, kube_client},
};
use serde_json::{Value, json};
use shunt_tests::apiserver::{ApiServer, Fault};
use tokio::{
    sync::{mpsc, watch},
    time::timeout,
};

use crate::scene::{DEADLINE, objects, patient, server_with};

fn service_cidr(ranges: &[&str]) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "ServiceCIDR",
        "metadata": { "name": "kubernetes" },
        "spec": { "cidrs": ranges },
    })
}

/// Returns the ranges of the next event about ServiceCIDRs.
async fn ranges(events: &mut mpsc::Receiver<WatchEvent>) -> Result<Vec<String>> {
    loop {
        let event = timeout(DEADLINE, events.recv()).await?.context("the source ended")?;
        let objects = match event {
            WatchEvent::ServiceCidrs(Delta::Replace(objects)) => objects,
            WatchEvent::ServiceCidrs(Delta::Apply(object)) => vec![object],
            _ => continue,
        };
        return Ok(objects.iter().flat_map(|object| &object.cidrs).map(ToString::to_string).collect());
    }
}

async fn start(
    server: &ApiServer,
) -> Result<(mpsc::Receiver<WatchEvent>, watch::Receiver<proxy_userspace::watch::WatchStatus>)> {
    let client =
        kube_client(None, &[server.url()], &ProxyVariables::default(), &ignore_api_requests()).await?;
    let source = ApiSource::new(client, "node1").with_timing(patient()).with_service_cidrs();
    let status = source.status();
    let (tx, events) = mpsc::channel(16);
    tokio::spawn(source.run(tx));
    Ok((events, status))
}

#[tokio::test]
async fn service_cidrs_are_listed_and_their_changes_follow() -> Result<()> {
    let mut all = Vec::from(objects());
    all.push(service_cidr(&["10.96.0.0/16", "fd96::/112"]));
    let server = server_with(&all).await?;
    let (mut events, _status) = start(&server).await?;
    assert_eq!(ranges(&mut events).await?, ["10.96.0.0/16", "fd96::/112"]);
    server.put(service_cidr(&["10.96.0.0/12"]))?;
    assert_eq!(ranges(&mut events).await?, ["10.96.0.0/12"]);
    Ok(())
}

#[tokio::test]
async fn forbidden_service_cidrs_are_requested_again_and_others_are_watched() -> Result<()> {
    let mut all = Vec::from(objects());
    all.push(service_cidr(&["10.96.0.0/16"]));
    let server = server_with(&all).await?;
    server.inject_fault(Some("servicecidrs"), None, Fault::Forbidden, 3);
    let (mut events, mut status) = start(&server).await?;
    timeout(DEADLINE, status.wait_for(proxy_userspace::watch::WatchStatus::synced)).await??;
    assert_eq!(status.borrow().service_cidrs.last_error, None);
    assert_eq!(ranges(&mut events).await?, ["10.96.0.0/16"]);
    Ok(())
}
