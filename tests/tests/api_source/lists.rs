//! The lists that cost the server least: streamed, or else from its cache.

use std::time::Duration;

use anyhow::{Context as _, Result};
use proxy_userspace::{net::ContentType, watch::Timing};
use shunt_tests::apiserver::{Fault, Interruption, Request, Verb};

use super::{
    SERVICES,
    scene::{Scene, many_services, objects, patient, quick, server_with, service},
};

/// Returns the parameters that decide from where the server takes a list.
fn source_of(request: &Request) -> [Option<&str>; 3] {
    ["resourceVersion", "limit", "continue"].map(|name| request.query.get(name))
}

#[tokio::test]
async fn a_server_that_refuses_streaming_lists_from_its_cache() -> Result<()> {
    let server = server_with(&many_services(1203)).await?;
    server.inject_fault(None, Some(Verb::WatchList), Fault::RefuseStreaming, usize::MAX);
    let mut scene = Scene::watching(server, patient()).await?;
    scene.synced().await?;
    assert_eq!(scene.services.len(), 1203);
    let lists = scene.requests("services", Verb::List);
    assert_eq!(lists.iter().map(source_of).collect::<Vec<_>>(), [[Some("0"), Some("500"), None]]);
    scene.server.put(service("s0000", 81))?;
    scene.port("s0000", 81).await
}

#[tokio::test]
async fn the_first_list_comes_in_parts_and_a_later_one_whole() -> Result<()> {
    for encoding in ContentType::ALL {
        let server = server_with(&many_services(300)).await?;
        let mut scene = Scene::watching_as(encoding, server, patient()).await?;
        scene.synced().await?;
        assert_eq!(
            scene.service_log(0),
            ["services .. 128 objects", "services .. 128 objects", "services = 44 objects"]
        );
        assert_eq!(scene.services.len(), 300);
        scene.server.inject_fault(SERVICES, Some(Verb::Watch), Fault::ExpiredInStream, 1);
        scene.server.interrupt(Interruption::End);
        scene.until(|scene| !scene.service_log(3).is_empty()).await?;
        assert!(scene.service_log(3)[0].starts_with("services = s0000 s0001 "), "{:?}", scene.log);
        assert_eq!(scene.services.len(), 300);
    }
    Ok(())
}

#[tokio::test]
async fn a_server_that_ignores_streaming_is_listed() -> Result<()> {
    let server = server_with(&objects()).await?;
    server.inject_fault(None, Some(Verb::WatchList), Fault::IgnoreStreaming, usize::MAX);
    let mut scene = Scene::watching(server, quick()).await?;
    scene.synced().await?;
    assert_eq!(scene.port_of("web"), Some(80));
    assert_eq!(scene.service_log(0), ["services = web"]);
    Ok(())
}

#[tokio::test]
async fn a_server_without_a_cache_is_listed_by_pages() -> Result<()> {
    for encoding in ContentType::ALL {
        let server = server_with(&many_services(1203)).await?;
        server.disable_cache();
        server.inject_fault(None, Some(Verb::WatchList), Fault::RefuseStreaming, usize::MAX);
        let mut scene = Scene::watching_as(encoding, server, patient()).await?;
        scene.synced().await?;
        assert_eq!(scene.services.len(), 1203);
        let lists = scene.requests("services", Verb::List);
        let versions: Vec<_> = lists.iter().map(|list| list.query.get("resourceVersion")).collect();
        assert_eq!(versions, [Some("0"), None, None]);
        assert!(lists.iter().all(|list| list.query.get("limit") == Some("500")));
        // Later lists have pages too.
        scene.server.inject_fault(SERVICES, Some(Verb::Watch), Fault::ExpiredInStream, 1);
        scene.server.interrupt(Interruption::End);
        scene.requested("services", Verb::List, 6).await?;
        assert_eq!(scene.requests("services", Verb::List)[3].query.get("limit"), Some("500"));
    }
    Ok(())
}

#[tokio::test]
async fn after_an_expired_watch_the_list_is_at_least_as_new() -> Result<()> {
    for is_streaming in [true, false] {
        let server = server_with(&objects()).await?;
        if !is_streaming {
            server.inject_fault(None, Some(Verb::WatchList), Fault::RefuseStreaming, usize::MAX);
        }
        let mut scene = Scene::watching(server, patient()).await?;
        scene.synced().await?;
        let version = scene.server.put(service("web", 81))?.to_string();
        scene.port("web", 81).await?;
        scene.server.inject_fault(SERVICES, Some(Verb::Watch), Fault::ExpiredInStream, 1);
        scene.server.interrupt(Interruption::End);
        let verb = if is_streaming { Verb::WatchList } else { Verb::List };
        scene.requested("services", verb, 2).await?;
        let last = scene.requests("services", verb).pop().context("a list")?;
        assert_eq!(source_of(&last), [Some(&*version), None, None], "streaming: {is_streaming}");
        scene.server.put(service("web", 82))?;
        scene.port("web", 82).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_server_without_the_last_version_is_asked_for_its_newest_data() -> Result<()> {
    for is_streaming in [true, false] {
        let server = server_with(&objects()).await?;
        if !is_streaming {
            server.inject_fault(None, Some(Verb::WatchList), Fault::RefuseStreaming, usize::MAX);
        }
        let backup = server.backup();
        let mut scene = Scene::watching(server, patient()).await?;
        scene.synced().await?;
        scene.server.put(service("lost", 80))?;
        scene.port("lost", 80).await?;
        scene.server.down().await;
        scene.server.restore_backup(backup);
        scene.server.inject_fault(SERVICES, Some(Verb::Watch), Fault::Gone, 1);
        scene.server.up().await?;
        scene.until(|scene| scene.services.len() == 1).await?;
        let verb = if is_streaming { Verb::WatchList } else { Verb::List };
        let lists = scene.requests("services", verb);
        let [.., refused, last] = &*lists else { panic!("{lists:?}") };
        assert!(refused.query.get("resourceVersion").is_some_and(|version| version != "0"));
        assert_eq!(last.query.get("resourceVersion"), None, "streaming: {is_streaming}");
    }
    Ok(())
}

#[tokio::test]
async fn streaming_is_tried_again_after_a_while() -> Result<()> {
    let server = server_with(&objects()).await?;
    server.inject_fault(None, Some(Verb::WatchList), Fault::RefuseStreaming, 3);
    let timing = Timing { streaming_retry: Duration::from_millis(200), ..patient() };
    let mut scene = Scene::watching(server, timing).await?;
    scene.synced().await?;
    assert_eq!(scene.requests("services", Verb::List).len(), 1);
    tokio::time::sleep(timing.streaming_retry).await;
    scene.server.inject_fault(SERVICES, Some(Verb::Watch), Fault::ExpiredInStream, 1);
    scene.server.interrupt(Interruption::End);
    scene.requested("services", Verb::WatchList, 2).await?;
    assert_eq!(scene.requests("services", Verb::List).len(), 1);
    scene.server.put(service("web", 81))?;
    scene.port("web", 81).await
}

#[tokio::test]
async fn an_expired_continue_token_leads_to_a_list_without_pages() -> Result<()> {
    let server = server_with(&many_services(700)).await?;
    server.disable_cache();
    server.inject_fault(None, Some(Verb::WatchList), Fault::RefuseStreaming, usize::MAX);
    server.inject_fault(SERVICES, Some(Verb::List), Fault::ExpireContinue, 1);
    let mut scene = Scene::watching(server, patient()).await?;
    scene.synced().await?;
    assert_eq!(scene.services.len(), 700);
    let complete = scene.service_log(0).into_iter().filter(|event| event.starts_with("services ="));
    assert_eq!(complete.count(), 1);
    let lists = scene.requests("services", Verb::List);
    assert_eq!(lists.len(), 3);
    assert_eq!(source_of(&lists[2]), [Some("0"), None, None]);
    assert_eq!(scene.status.borrow().services.last_error, None);
    Ok(())
}
