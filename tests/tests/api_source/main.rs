//! The API source against a real HTTP server that lists and watches like a kube-apiserver, and can
//! misbehave.

mod connections;
mod credentials;
mod direct_return;
mod failover;
mod http_proxies;
mod lists;
mod proxy_server;
mod requests;
mod scene;
mod service_cidrs;
mod start;
mod tls_server;
mod versions;

use std::time::Duration;

use anyhow::{Context as _, Result};
use proxy_userspace::{
    model::NamespacedName,
    net::{ContentType, ProxyVariables},
    watch::{ApiSource, KindStatus, ignore_api_requests, kube_client},
};
use serde_json::json;
use shunt_tests::apiserver::{Fault, Interruption, Request, Verb, WrongVersion};
use tokio::{sync::mpsc, time::timeout};

use self::scene::{DEADLINE, Scene, labelled, node, objects, patient, quick, server_with, service, slice};

const SERVICES: Option<&str> = Some("services");

#[tokio::test]
async fn lists_are_streamed_and_changes_follow() -> Result<()> {
    let mut scene = Scene::start(&objects(), patient()).await?;
    assert_eq!(scene.port_of("web"), Some(80));
    assert_eq!((scene.slices.len(), scene.nodes.len()), (1, 1));
    for resource in ["services", "endpointslices", "nodes"] {
        assert_eq!(scene.requests(resource, Verb::WatchList).len(), 1, "{resource}");
        assert_eq!(scene.requests(resource, Verb::List).len(), 0, "{resource}");
    }
    scene.server.put(service("web", 81))?;
    scene.server.put(service("new", 82))?;
    scene.server.delete("Service", "default", "web")?;
    scene.until(|scene| scene.service_log(0).len() == 4).await?;
    assert_eq!(
        scene.service_log(0),
        ["services = web", "services + web", "services + new", "services - web"]
    );
    Ok(())
}

#[tokio::test]
async fn empty_kinds_are_listed_too() -> Result<()> {
    let scene = Scene::start(&[], patient()).await?;
    assert_eq!(scene.log.len(), 3);
    assert!(scene.services.is_empty() && scene.slices.is_empty() && scene.nodes.is_empty());
    Ok(())
}

#[tokio::test]
async fn requests_carry_the_selectors() -> Result<()> {
    let others = [
        labelled(service("theirs", 80), "service.kubernetes.io/service-proxy-name"),
        labelled(slice("headless-1"), "service.kubernetes.io/headless"),
        node("node2"),
    ];
    let mut scene = Scene::start(&[&objects()[..], &others[..]].concat(), patient()).await?;
    assert_eq!((scene.services.len(), scene.slices.len(), scene.nodes.len()), (1, 1, 1));
    for request in scene.server.requests() {
        let selectors = (request.query.get("labelSelector"), request.query.get("fieldSelector"));
        let expected = match request.plural {
            "services" => (Some("!service.kubernetes.io/service-proxy-name"), Some("spec.clusterIP!=None")),
            "endpointslices" => (Some("!service.kubernetes.io/headless"), None),
            _ => (None, Some("metadata.name=node1")),
        };
        assert_eq!(selectors, expected, "{}", request.plural);
    }
    // A Service that gets another proxy's label is deleted for this one.
    scene.server.put(labelled(service("web", 80), "service.kubernetes.io/service-proxy-name"))?;
    scene.until(|scene| scene.services.is_empty()).await
}

#[tokio::test]
async fn bookmark_updates_the_version_to_resume_from() -> Result<()> {
    let mut scene = Scene::start(&objects(), patient()).await?;
    scene.server.advance_to(700);
    // A change of another kind raises the version, which the bookmarks of all watches then carry.
    scene.server.put(service("other", 80))?;
    scene.port("other", 80).await?;
    let resumed = |request: &Request| request.query.get("resourceVersion").and_then(|text| text.parse().ok());
    let reached = async {
        while scene
            .requests("nodes", Verb::Watch)
            .iter()
            .filter_map(resumed)
            .all(|version: u64| version < 700)
        {
            scene.server.interrupt(Interruption::Bookmark);
            tokio::time::sleep(Duration::from_millis(50)).await;
            scene.server.interrupt(Interruption::End);
        }
    };
    timeout(DEADLINE, reached).await.context("no watch resumed from a bookmark")?;
    assert_eq!(scene.requests("nodes", Verb::WatchList).len(), 1);
    Ok(())
}

#[tokio::test]
async fn expired_history_in_the_stream_leads_to_one_new_list() -> Result<()> {
    for encoding in ContentType::ALL {
        let mut scene =
            Scene::start_as(encoding, &[service("gone", 1), service("web", 80)], patient()).await?;
        scene.server.down().await;
        scene.server.delete("Service", "default", "gone")?;
        scene.server.inject_fault(SERVICES, Some(Verb::Watch), Fault::ExpiredInStream, 1);
        scene.server.up().await?;
        scene.until(|scene| scene.services.len() == 1).await?;
        assert_eq!(scene.service_log(1), ["services = web"]);
    }
    Ok(())
}

#[tokio::test]
async fn http_gone_on_a_watch_leads_to_a_new_list() -> Result<()> {
    let mut scene = Scene::start(&objects(), patient()).await?;
    scene.server.inject_fault(SERVICES, Some(Verb::Watch), Fault::Gone, 1);
    scene.server.interrupt(Interruption::End);
    scene.requested("services", Verb::WatchList, 2).await?;
    scene.server.put(service("web", 81))?;
    scene.port("web", 81).await
}

#[tokio::test]
async fn version_before_compaction_leads_to_a_new_list() -> Result<()> {
    let mut scene = Scene::start(&objects(), patient()).await?;
    scene.server.down().await;
    scene.server.put(service("web", 81))?;
    scene.server.compact();
    scene.server.up().await?;
    scene.port("web", 81).await?;
    assert_eq!(scene.service_log(1), ["services = web"]);
    Ok(())
}

#[tokio::test]
async fn connection_cut_within_an_event_loses_nothing() -> Result<()> {
    for encoding in ContentType::ALL {
        let mut scene = Scene::start_as(encoding, &objects(), patient()).await?;
        for port in 100..110 {
            scene.server.interrupt(Interruption::BreakMidEvent);
            scene.server.put(service("web", port))?;
            scene.port("web", port).await?;
        }
        // The connections broke, the history did not: nothing was listed again, and no event came
        // twice.
        assert_eq!(scene.requests("services", Verb::WatchList).len(), 1);
        assert_eq!(scene.service_log(1), ["services + web"; 10]);
    }
    Ok(())
}

#[tokio::test]
async fn interrupted_list_is_requested_again() -> Result<()> {
    for encoding in ContentType::ALL {
        let server = server_with(&objects()).await?;
        server.inject_fault(None, Some(Verb::WatchList), Fault::BreakMidBody, 3);
        server.inject_fault(None, Some(Verb::WatchList), Fault::RefuseStreaming, usize::MAX);
        server.inject_fault(None, Some(Verb::List), Fault::BreakMidBody, 6);
        let mut scene = Scene::watching_as(encoding, server, patient()).await?;
        scene.synced().await?;
        assert_eq!(scene.log.len(), 3, "{:?}", scene.log);
    }
    Ok(())
}

#[tokio::test]
async fn forbidden_and_unauthorized_are_reported_and_retried() -> Result<()> {
    for (encoding, fault, told) in [
        (ContentType::Protobuf, Fault::Forbidden, "(403): services is forbidden"),
        (ContentType::Json, Fault::Forbidden, "(403): services is forbidden"),
        (ContentType::Protobuf, Fault::Unauthorized, "(401): Unauthorized"),
    ] {
        let server = server_with(&objects()).await?;
        server.inject_fault(SERVICES, None, fault, usize::MAX);
        let mut scene = Scene::watching_as(encoding, server, patient()).await?;
        let failing = |kind: &KindStatus| kind.last_error.as_ref().is_some_and(|error| error.contains(told));
        let status = scene.status(|status| failing(&status.services) && status.nodes.synced).await?;
        assert!(!status.services.synced && status.services.connected_since.is_none());
        scene.server.clear_faults();
        scene.synced().await?;
        let status = scene.status(|status| status.services.connected_since.is_some()).await?;
        assert_eq!(status.services.last_error, None);
    }
    Ok(())
}

#[tokio::test]
async fn objects_stay_while_the_server_is_away() -> Result<()> {
    let mut scene = Scene::start(&objects(), patient()).await?;
    scene.server.down().await;
    let failing = |kind: &KindStatus| kind.last_error.is_some() && kind.synced;
    scene.status(|status| failing(&status.services) && failing(&status.nodes)).await?;
    assert!(scene.events.is_empty(), "an absent server changes no object");
    scene.server.up().await?;
    scene.server.put(service("web", 81))?;
    scene.port("web", 81).await?;
    assert_eq!(scene.service_log(1), ["services + web"]);
    Ok(())
}

#[tokio::test]
async fn source_waits_for_a_server_that_is_not_up_yet() -> Result<()> {
    let mut server = server_with(&objects()).await?;
    server.down().await;
    let mut scene = Scene::watching(server, patient()).await?;
    let status = scene.status(|status| status.services.last_error.is_some()).await?;
    let error = status.services.last_error.unwrap_or_default();
    assert!(error.contains("refused"), "{error}");
    scene.server.up().await?;
    scene.synced().await
}

#[tokio::test]
async fn requests_without_answer_are_repeated() -> Result<()> {
    let server = server_with(&objects()).await?;
    for fault in [Fault::Hang, Fault::HangAfterHead] {
        server.inject_fault(SERVICES, Some(Verb::WatchList), fault, 1);
        server.inject_fault(SERVICES, Some(Verb::List), fault, 1);
    }
    let mut scene = Scene::watching(server, quick()).await?;
    scene.synced().await?;
    assert_eq!(scene.port_of("web"), Some(80));
    Ok(())
}

#[tokio::test]
async fn silently_dead_watch_is_replaced() -> Result<()> {
    let mut scene = Scene::start(&objects(), quick()).await?;
    scene.server.interrupt(Interruption::Stall);
    scene.server.put(service("web", 81))?;
    scene.port("web", 81).await?;
    assert_eq!(scene.service_log(1), ["services + web"]);
    Ok(())
}

#[tokio::test]
async fn errors_and_invalid_data_are_survived() -> Result<()> {
    for encoding in ContentType::ALL {
        let server = server_with(&objects()).await?;
        for fault in [Fault::InternalError, Fault::NotJson, Fault::EmptyBody] {
            server.inject_fault(SERVICES, Some(Verb::WatchList), fault, 2);
            server.inject_fault(SERVICES, Some(Verb::Watch), fault, 2);
        }
        let mut scene = Scene::watching_as(encoding, server, patient()).await?;
        scene.synced().await?;
        scene.server.interrupt(Interruption::End);
        scene.server.put(service("web", 81))?;
        scene.port("web", 81).await?;
    }
    Ok(())
}

#[tokio::test]
async fn invalid_watch_data_leads_to_a_new_list() -> Result<()> {
    for encoding in ContentType::ALL {
        let mut scene = Scene::start_as(encoding, &objects(), patient()).await?;
        scene.server.inject_fault(SERVICES, Some(Verb::Watch), Fault::NotJson, usize::MAX);
        scene.server.interrupt(Interruption::End);
        scene.requested("services", Verb::WatchList, 2).await?;
        scene.server.put(service("web", 81))?;
        scene.port("web", 81).await?;
    }
    Ok(())
}

#[tokio::test]
async fn server_with_older_data_is_listed_again() -> Result<()> {
    let mut scene = Scene::start(&objects(), patient()).await?;
    let backup = scene.server.backup();
    scene.server.put(service("web", 81))?;
    scene.server.put(service("lost", 80))?;
    scene.port("lost", 80).await?;
    scene.server.down().await;
    scene.server.restore_backup(backup);
    scene.server.up().await?;
    // Nothing changes on the server. Only its bookmarks show it, which come once a minute.
    let listed = async {
        while scene.requests("services", Verb::WatchList).len() < 2 {
            scene.server.interrupt(Interruption::Bookmark);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(DEADLINE, listed).await.context("no bookmark led to a new list")?;
    scene.port("web", 80).await?;
    assert_eq!(scene.services.len(), 1);
    Ok(())
}

#[tokio::test]
async fn silent_watches_from_a_lost_version_lead_to_a_new_list() -> Result<()> {
    let mut scene = Scene::start(&objects(), quick()).await?;
    let backup = scene.server.backup();
    scene.server.put(service("web", 81))?;
    scene.port("web", 81).await?;
    // The time of the change is written after the change is sent.
    tokio::time::sleep(Duration::from_millis(50)).await;
    // A watch may be between its end and the next one.
    let before = scene.status.borrow().services.last_event;
    let bookmarked = async {
        while scene.status.borrow().services.last_event == before {
            scene.server.interrupt(Interruption::Bookmark);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(DEADLINE, bookmarked).await.context("no bookmark arrives")?;
    scene.server.down().await;
    scene.server.restore_backup(backup);
    scene.server.up().await?;
    // As with a real server, no bookmark comes before it reaches the version of the watch.
    scene.port("web", 80).await
}

#[tokio::test]
async fn wrong_versions_cost_at_most_one_list() -> Result<()> {
    for version in [WrongVersion::Low, WrongVersion::High, WrongVersion::NotANumber, WrongVersion::Missing] {
        let mut scene = Scene::start(&objects(), patient()).await?;
        scene.server.inject_fault(SERVICES, None, Fault::WrongVersions(version), 1);
        scene.server.interrupt(Interruption::End);
        scene.requested("services", Verb::Watch, 1).await?;
        for port in 100..103 {
            scene.server.put(service("web", port))?;
            scene.port("web", port).await.with_context(|| format!("{version:?}"))?;
        }
        let watches = scene.requests("services", Verb::Watch).len();
        scene.server.interrupt(Interruption::End);
        scene.requested("services", Verb::Watch, watches + 1).await?;
        scene.server.put(service("web", 200))?;
        // A watch from a future version does not see the change. A bookmark, as sent every minute,
        // carries the server's version.
        scene.server.interrupt(Interruption::Bookmark);
        scene.port("web", 200).await.with_context(|| format!("after {version:?}"))?;
    }
    Ok(())
}

#[tokio::test]
async fn one_bad_object_never_stops_the_others() -> Result<()> {
    for encoding in ContentType::ALL {
        let mut bad = service("bad", 80);
        bad["spec"]["ports"][0]["port"] = json!("eighty");
        let mut odd = service("odd", 80);
        odd["spec"]["externalIPs"] = json!(["198.51.100.1", "nonsense"]);
        let mut scene = Scene::start_as(encoding, &[bad.clone(), odd, service("web", 80)], patient()).await?;
        assert_eq!(scene.service_log(0), ["services = odd web"]);
        assert_eq!(scene.services[&NamespacedName::new("default", "odd")].external_ips.len(), 1);
        // During the watch, the last good version stays.
        scene.server.put(service("bad", 81))?;
        scene.port("bad", 81).await?;
        scene.server.put(bad)?;
        scene.server.put(service("web", 82))?;
        scene.port("web", 82).await?;
        assert_eq!(scene.port_of("bad"), Some(81));
    }
    Ok(())
}

#[tokio::test]
async fn an_object_with_a_bad_name_is_ignored_from_its_list_to_its_deletion() -> Result<()> {
    const BAD: &str = "a\" -j ACCEPT\n";
    let mut scene = Scene::start(&[service(BAD, 80), service("web", 80)], patient()).await?;
    scene.server.put(service(BAD, 81))?;
    scene.server.put(service("web", 81))?;
    scene.port("web", 81).await?;
    scene.server.delete("Service", "default", BAD)?;
    scene.server.put(service("web", 82))?;
    scene.port("web", 82).await?;
    assert_eq!(scene.service_log(0), ["services = web", "services + web", "services + web"]);
    let requests = [Verb::WatchList, Verb::Watch].map(|verb| scene.requests("services", verb).len());
    assert_eq!(requests, [1, 0], "the first watch continues");
    Ok(())
}

#[tokio::test]
async fn source_ends_when_its_receiver_is_dropped() -> Result<()> {
    let server = server_with(&objects()).await?;
    let client =
        kube_client(None, &[server.url()], &ProxyVariables::default(), &ignore_api_requests()).await?;
    let (tx, rx) = mpsc::channel(16);
    let source = tokio::spawn(ApiSource::new(client, "node1").with_timing(patient()).run(tx));
    drop(rx);
    timeout(DEADLINE, source).await???;
    Ok(())
}
